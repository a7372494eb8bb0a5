//! What a converter may do: read and write the files that it was given, compute, end.

use crate::limits::Limits;
use rustix::process::{
    DumpableBehavior, Pid, Resource, Rlimit, Signal, geteuid, getppid, set_dumpable_behavior,
    set_parent_process_death_signal, setrlimit,
};
use rustix::thread::{Gid, Uid};
use seccompiler::{BpfProgram, SeccompAction, SeccompFilter, SeccompRule};
use std::collections::BTreeMap;
use std::io;

/// Bytes of address space: the tree of the largest image that limits allow, stacks, buffers.
const ADDRESS_SPACE: u64 = 4 << 30;
/// Files that may be open: disk, socket, standard streams, and layers that wait.
const OPEN_FILES: u64 = 1024;

/// System calls that are needed after the last one that opens anything. Memory may be mapped but never be made executable, which the two rules
/// below see to.
const CALLS: &[libc::c_long] = &[
    // The layers, the disk, the socket.
    libc::SYS_read,
    libc::SYS_readv,
    libc::SYS_pread64,
    libc::SYS_write,
    libc::SYS_writev,
    libc::SYS_pwrite64,
    libc::SYS_lseek,
    libc::SYS_fallocate,
    libc::SYS_ftruncate,
    libc::SYS_fstat,
    libc::SYS_statx,
    libc::SYS_newfstatat,
    libc::SYS_recvmsg,
    libc::SYS_sendmsg,
    libc::SYS_close,
    // Memory, threads, time.
    libc::SYS_munmap,
    libc::SYS_mremap,
    libc::SYS_madvise,
    libc::SYS_brk,
    libc::SYS_futex,
    libc::SYS_sched_yield,
    libc::SYS_clock_gettime,
    libc::SYS_clock_nanosleep,
    libc::SYS_nanosleep,
    libc::SYS_getrandom,
    libc::SYS_restart_syscall,
    // The thread's begin and end, panics, the end.
    libc::SYS_set_robust_list,
    libc::SYS_rseq,
    libc::SYS_sched_getaffinity,
    libc::SYS_prctl,
    libc::SYS_sigaltstack,
    libc::SYS_rt_sigprocmask,
    libc::SYS_rt_sigaction,
    libc::SYS_rt_sigreturn,
    libc::SYS_gettid,
    libc::SYS_getpid,
    libc::SYS_tgkill,
    libc::SYS_tkill,
    libc::SYS_exit,
    libc::SYS_exit_group,
];

/// Ends this process when the store's thread that started it does.
pub(super) fn die_with_parent() -> io::Result<()> {
    let parent = getppid();
    set_parent_process_death_signal(Some(Signal::KILL))?;
    // It may have died before.
    if getppid() == parent && parent != Some(Pid::INIT) {
        Ok(())
    } else {
        Err(io::Error::other("nobody waits for us"))
    }
}

pub(super) fn limit_resources(limits: &Limits) -> io::Result<()> {
    let resources = [
        (Resource::As, ADDRESS_SPACE),
        (Resource::Nofile, OPEN_FILES),
        (Resource::Fsize, limits.disk_bytes),
        (Resource::Core, 0),
        (Resource::Memlock, 0),
    ];
    for (resource, limit) in resources {
        setrlimit(resource, Rlimit { current: Some(limit), maximum: Some(limit) })?;
    }
    Ok(())
}

/// Becomes `user`, if it is root. To be called while there is one thread.
pub(super) fn drop_privileges(user: u32) -> io::Result<()> {
    rustix::thread::set_no_new_privs(true)?;
    if geteuid().is_root() {
        let (uid, gid) = (Uid::from_raw(user), Gid::from_raw(user));
        rustix::thread::set_thread_groups(&[])?;
        rustix::thread::set_thread_res_gid(gid, gid, gid)?;
        rustix::thread::set_thread_res_uid(uid, uid, uid)?;
        // A change of the user takes the signal away that die_with_parent asked for.
        die_with_parent()?;
    }
    set_dumpable_behavior(DumpableBehavior::NotDumpable)?;
    Ok(())
}

/// From here on anything else than [`CALLS`] ends the process, in every thread.
pub(super) fn close_in() -> io::Result<()> {
    let filter = filter().map_err(io::Error::other)?;
    seccompiler::apply_filter_all_threads(&filter).map_err(io::Error::other)
}

fn filter() -> Result<BpfProgram, seccompiler::Error> {
    use seccompiler::{SeccompCmpArgLen, SeccompCmpOp, SeccompCondition};
    // Their third argument says what may be done with the memory.
    let not_executable = || {
        let protection = 2;
        let executable = libc::PROT_EXEC as u64;
        let condition =
            SeccompCondition::new(protection, SeccompCmpArgLen::Dword, SeccompCmpOp::MaskedEq(executable), 0);
        condition.and_then(|condition| SeccompRule::new(vec![condition]))
    };
    let mut rules: BTreeMap<i64, Vec<SeccompRule>> = CALLS.iter().map(|call| (*call, Vec::new())).collect();
    for call in [libc::SYS_mmap, libc::SYS_mprotect] {
        rules.insert(call, vec![not_executable()?]);
    }
    // The standard library's debug assertions ask whether a file that is closed was open.
    let get_flags =
        SeccompCondition::new(1, SeccompCmpArgLen::Dword, SeccompCmpOp::Eq, libc::F_GETFD as u64)?;
    rules.insert(libc::SYS_fcntl, vec![SeccompRule::new(vec![get_flags])?]);
    let arch = std::env::consts::ARCH.try_into()?;
    let filter = SeccompFilter::new(rules, SeccompAction::KillProcess, SeccompAction::Allow, arch)?;
    Ok(filter.try_into()?)
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test fails by panicking")]
mod tests {
    use super::*;
    use std::os::unix::process::ExitStatusExt as _;
    use std::process::{Command, Stdio};

    /// Set in the process that is closed in: what it tries then.
    const TRY: &str = "IMP_IMAGE_TEST_TRY";

    /// Not a test by itself: the other one runs it in a process of its own.
    #[test]
    fn closed_in() {
        let Ok(what) = std::env::var(TRY) else { return };
        let file = std::fs::File::open("/dev/zero").unwrap();
        limit_resources(&Limits::default()).unwrap();
        drop_privileges(65_534).unwrap();
        assert!(!rustix::process::geteuid().is_root() && !rustix::process::getegid().is_root());
        if what != "open, not closed in" {
            close_in().unwrap();
        }
        match what.as_str() {
            "compute" => {
                let mut bytes = vec![1_u8; 8 << 20];
                std::io::Read::read_exact(&mut &file, &mut bytes).unwrap();
                assert!(bytes.iter().all(|byte| *byte == 0));
            }
            "open" | "open, not closed in" => drop(std::fs::File::open("/etc/passwd")),
            "socket" => drop(std::net::TcpListener::bind("127.0.0.1:0")),
            "exec" => drop(Command::new("true").spawn()),
            "kill" => drop(rustix::process::test_kill_process(rustix::process::getppid().unwrap())),
            _ => unreachable!("{what}"),
        }
        std::process::exit(7);
    }

    #[test]
    fn whoever_is_closed_in_can_compute_and_nothing_else() {
        for (what, signal) in [
            ("compute", None),
            ("open, not closed in", None),
            ("open", Some(libc::SIGSYS)),
            ("socket", Some(libc::SIGSYS)),
            ("exec", Some(libc::SIGSYS)),
            ("kill", Some(libc::SIGSYS)),
        ] {
            let status = Command::new(std::env::current_exe().unwrap())
                .args(["--exact", "converter::sandbox::tests::closed_in", "--test-threads=1"])
                .env(TRY, what)
                .stdout(Stdio::null())
                .stderr(Stdio::null())
                .status()
                .unwrap();
            assert_eq!((status.code(), status.signal()), (signal.is_none().then_some(7), signal), "{what}");
        }
    }
}
