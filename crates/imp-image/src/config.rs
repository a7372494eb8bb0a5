//! What runs: the image's configuration with a VM's wishes applied, by Kubernetes' rules. Pure.

use oci_spec::image::ImageConfiguration;

/// What a VM says about its workload; empty means that the image decides.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct WorkloadOverrides {
    /// As a Pod's `command`: replaces ENTRYPOINT, and CMD with it.
    pub command: Vec<String>,
    /// As a Pod's `args`: replaces CMD.
    pub args: Vec<String>,
    /// Above the image's ENV, by name; the last one of a name counts.
    pub env: Vec<(String, String)>,
    /// Replaces WORKDIR.
    pub working_dir: String,
    /// Replaces USER.
    pub user: String,
}

/// What runs in the VM.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RuntimeConfig {
    /// The complete command line; empty when neither image nor VM names a program.
    pub argv: Vec<String>,
    /// Every variable once: the image's in its order, then the VM's.
    pub env: Vec<(String, String)>,
    /// Never empty; "/" when nobody says.
    pub working_dir: String,
    /// As the image's USER; empty: root.
    pub user: String,
    /// As the image's STOPSIGNAL; empty: SIGTERM.
    pub stop_signal: String,
}

/// Applies a VM's wishes to an image's configuration.
///
/// Command and arguments follow Kubernetes' table ("Define a Command and Arguments for a Container", notes): a command drops
/// ENTRYPOINT and CMD, arguments alone replace CMD. Arguments stay what they are; no shell splits or joins them.
#[must_use]
pub fn runtime_config(image: &ImageConfiguration, wishes: &WorkloadOverrides) -> RuntimeConfig {
    let config = image.config().clone().unwrap_or_default();
    let entrypoint = config.entrypoint().clone().unwrap_or_default();
    let cmd = config.cmd().clone().unwrap_or_default();
    let argv = match (wishes.command.is_empty(), wishes.args.is_empty()) {
        (true, true) => [entrypoint, cmd].concat(),
        (true, false) => [entrypoint, wishes.args.clone()].concat(),
        (false, _) => [wishes.command.clone(), wishes.args.clone()].concat(),
    };
    let image_env = config.env().clone().unwrap_or_default();
    let image_env = image_env.iter().filter_map(|entry| entry.split_once('='));
    let image_env = image_env.map(|(name, value)| (name.to_owned(), value.to_owned()));
    let mut env: Vec<(String, String)> = Vec::new();
    for (name, value) in image_env.chain(wishes.env.iter().cloned()) {
        if name.is_empty() {
            continue;
        }
        match env.iter_mut().find(|(known, _)| *known == name) {
            Some(entry) => entry.1 = value,
            None => env.push((name, value)),
        }
    }
    let or = |wish: &str, image: Option<&String>, default: &str| {
        let image = image.map(String::as_str).filter(|text| !text.is_empty()).unwrap_or(default);
        if wish.is_empty() { image.to_owned() } else { wish.to_owned() }
    };
    RuntimeConfig {
        argv,
        env,
        working_dir: or(&wishes.working_dir, config.working_dir().as_ref(), "/"),
        user: or(&wishes.user, config.user().as_ref(), ""),
        stop_signal: config.stop_signal().clone().unwrap_or_default(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn image(config: serde_json::Value) -> ImageConfiguration {
        serde_json::from_value(serde_json::json!({
            "architecture": "amd64", "os": "linux", "rootfs": {"type": "layers", "diff_ids": []}, "config": config
        }))
        .expect("a configuration")
    }

    fn strings(all: &[&str]) -> Vec<String> {
        all.iter().map(ToString::to_string).collect()
    }

    fn pairs(all: &[(&str, &str)]) -> Vec<(String, String)> {
        all.iter().map(|(a, b)| ((*a).to_owned(), (*b).to_owned())).collect()
    }

    #[test]
    fn fr7_command_and_args_follow_kubernetes_table() {
        let image = image(serde_json::json!({"Entrypoint": ["/e", "a b", " "], "Cmd": ["x\ny"]}));
        for (command, args, argv) in [
            (&[][..], &[][..], &["/e", "a b", " ", "x\ny"][..]),
            (&[], &["z w"], &["/e", "a b", " ", "z w"]),
            (&["/c", ""], &[], &["/c", ""]),
            (&["/c"], &["z"], &["/c", "z"]),
        ] {
            let wishes =
                WorkloadOverrides { command: strings(command), args: strings(args), ..Default::default() };
            assert_eq!(runtime_config(&image, &wishes).argv, strings(argv), "{command:?} {args:?}");
        }
    }

    #[test]
    fn fr7_user_directory_and_signal_come_from_the_image_or_the_vm() {
        let image = image(serde_json::json!({
            "User": "1000:2000", "WorkingDir": "/does/not/exist", "StopSignal": "SIGUSR1"
        }));
        let plain = runtime_config(&image, &WorkloadOverrides::default());
        assert_eq!((plain.user.as_str(), plain.working_dir.as_str()), ("1000:2000", "/does/not/exist"));
        assert_eq!(plain.stop_signal, "SIGUSR1");
        let wishes =
            WorkloadOverrides { user: "www-data".into(), working_dir: "/srv".into(), ..Default::default() };
        let changed = runtime_config(&image, &wishes);
        assert_eq!((changed.user.as_str(), changed.working_dir.as_str()), ("www-data", "/srv"));
    }

    #[test]
    fn fr6_environment_of_the_image_is_the_base_and_the_vms_overrides_by_key() {
        let image = image(
            serde_json::json!({"Env": ["PATH=/opt/x/bin:/bin", "FOO=a", "EMPTY=", "EQ=a=b", "broken", "FOO=c"]}),
        );
        let wishes = WorkloadOverrides {
            env: pairs(&[("FOO", "b"), ("NEW", "1"), ("NEW", "2")]),
            ..Default::default()
        };
        let expected =
            [("PATH", "/opt/x/bin:/bin"), ("FOO", "b"), ("EMPTY", ""), ("EQ", "a=b"), ("NEW", "2")];
        assert_eq!(runtime_config(&image, &wishes).env, pairs(&expected));
    }

    #[test]
    fn an_image_without_configuration_says_nothing() {
        let image = ImageConfiguration::default();
        let expected = RuntimeConfig { working_dir: "/".into(), ..Default::default() };
        assert_eq!(runtime_config(&image, &WorkloadOverrides::default()), expected);
    }
}
