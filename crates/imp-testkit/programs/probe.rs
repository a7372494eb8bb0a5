//! A workload for tests: one static program that says what it was given and then does what it is told.
//!
//! Prints one line a fact, `NAME=VALUE`, values as Rust debug strings so that no byte of theirs can break a line: `argv`, `env`, `cwd`,
//! `Uid`, `Gid`, `Groups` (of /proc/self/status). Arguments, in order: `exit:N` ends with N, `abort` ends by SIGABRT, `wait` sleeps for ever,
//! `stderr:TEXT` writes there, `write:PATH` writes a file, `cat:PATH` prints one; anything else is ignored.

fn main() {
    let arguments: Vec<String> = std::env::args_os().map(|a| a.to_string_lossy().into_owned()).collect();
    println!("argv={arguments:?}");
    for (name, value) in std::env::vars_os() {
        println!("env={:?}", format!("{}={}", name.to_string_lossy(), value.to_string_lossy()));
    }
    println!("cwd={:?}", std::env::current_dir().map(|d| d.display().to_string()).unwrap_or_default());
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    for line in status.lines() {
        if let Some((name @ ("Uid" | "Gid" | "Groups"), value)) = line.split_once(':') {
            println!("{name}={:?}", value.trim());
        }
    }
    for argument in &arguments[1..] {
        let (word, rest) = argument.split_once(':').unwrap_or((argument, ""));
        match word {
            "exit" => std::process::exit(rest.parse().unwrap_or(255)),
            "abort" => std::process::abort(),
            "wait" => loop {
                std::thread::park();
            },
            "stderr" => eprintln!("{rest}"),
            "write" => match std::fs::write(rest, "written by probe\n") {
                Ok(()) => println!("wrote={rest:?}"),
                Err(error) => println!("error={:?}", error.to_string()),
            },
            "cat" => println!("cat={:?}", std::fs::read_to_string(rest).map_err(|e| e.to_string())),
            _ => {}
        }
    }
}
