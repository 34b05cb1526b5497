//! Environment, command and arguments: image defaults, the pod's own, and `$(VAR)`.
//!
//! Follows the kubelet (third_party/forked/golang/expansion, `makeEnvironment`) and the CRI
//! plugin of containerd, which adds PATH, HOSTNAME and TERM.

use std::collections::HashMap;
use std::net::IpAddr;

use oci_spec::image::Config as ImageConfig;
use sandman_protocol::v1;

use super::SpecError;

/// PATH of an image that sets none.
pub const DEFAULT_PATH: &str = "PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";

/// Values that only the host knows.
#[derive(Clone, Copy, Debug, Default)]
pub struct HostValues {
    /// Address of the sandbox.
    pub pod_ip: Option<IpAddr>,
    /// Address of this host.
    pub host_ip: Option<IpAddr>,
}

impl HostValues {
    fn text(&self, field: i32) -> String {
        let address = match v1::HostField::try_from(field) {
            Ok(v1::HostField::PodIp) => self.pod_ip,
            Ok(v1::HostField::HostIp) => self.host_ip,
            Ok(v1::HostField::Unspecified) | Err(_) => None,
        };
        address.map(|a| a.to_string()).unwrap_or_default()
    }
}

/// The pod's own variables, expanded in their order. Later ones see earlier ones.
#[must_use]
pub fn resolve(env: &[v1::EnvVar], host: &HostValues) -> Vec<(String, String)> {
    let mut known: HashMap<String, String> = HashMap::with_capacity(env.len());
    let mut resolved = Vec::with_capacity(env.len());
    for variable in env {
        let value = match &variable.value {
            Some(v1::env_var::Value::Literal(text)) => expand(text, &known),
            Some(v1::env_var::Value::HostField(field)) => host.text(*field),
            None => String::new(),
        };
        known.insert(variable.name.clone(), value.clone());
        resolved.push((variable.name.clone(), value));
    }
    resolved
}

/// The whole environment of the process, `NAME=value`, without repeated names.
#[must_use]
pub fn environment(
    image: Option<&ImageConfig>,
    own: &[(String, String)],
    hostname: &str,
    tty: bool,
) -> Vec<String> {
    let mut out: Vec<String> = vec![DEFAULT_PATH.to_owned()];
    if tty {
        set(&mut out, "TERM=xterm".to_owned());
    }
    set(&mut out, format!("HOSTNAME={hostname}"));
    for variable in image.and_then(|c| c.env().as_ref()).into_iter().flatten() {
        // A bare NAME in an image configuration has no value to give.
        if variable.contains('=') {
            set(&mut out, variable.clone());
        }
    }
    for (name, value) in own {
        set(&mut out, format!("{name}={value}"));
    }
    out
}

fn set(env: &mut Vec<String>, variable: String) {
    let name = variable
        .split_once('=')
        .map_or(variable.as_str(), |(name, _)| name);
    let same = env
        .iter()
        .position(|v| v.split_once('=').is_some_and(|(n, _)| n == name));
    match same {
        Some(index) => env[index] = variable,
        None => env.push(variable),
    }
}

/// The words of the container's command line.
///
/// `command` replaces ENTRYPOINT and with it CMD; `args` replaces CMD.
///
/// # Errors
/// [`SpecError::Config`] when neither the pod nor the image names a command.
pub fn command_line(
    container: &v1::Container,
    image: Option<&ImageConfig>,
    own: &[(String, String)],
) -> Result<Vec<String>, SpecError> {
    let known: HashMap<String, String> = own.iter().cloned().collect();
    let expand_all = |words: &[String]| words.iter().map(|w| expand(w, &known)).collect::<Vec<_>>();
    let image_words = |words: Option<&Option<Vec<String>>>| {
        words.and_then(|words| words.clone()).unwrap_or_default()
    };
    let mut command = expand_all(&container.command);
    let mut args = expand_all(&container.args);
    if command.is_empty() {
        if args.is_empty() {
            args = image_words(image.map(ImageConfig::cmd));
        }
        command = image_words(image.map(ImageConfig::entrypoint));
    }
    command.append(&mut args);
    if command.first().is_none_or(String::is_empty) {
        return Err(SpecError::config(
            "no command specified: set command or args, or use an image with ENTRYPOINT or CMD",
        ));
    }
    Ok(command)
}

/// Replaces `$(NAME)` by its value; unknown names stay as written and `$$` is one `$`.
#[must_use]
pub fn expand(text: &str, known: &HashMap<String, String>) -> String {
    let mut out = String::with_capacity(text.len());
    let mut rest = text;
    while let Some(position) = rest.find('$') {
        out.push_str(&rest[..position]);
        let after = &rest[position + 1..];
        if let Some(tail) = after.strip_prefix('$') {
            out.push('$');
            rest = tail;
        } else if let Some((name, tail)) = after
            .strip_prefix('(')
            .and_then(|inner| inner.split_once(')'))
        {
            match known.get(name) {
                Some(value) => out.push_str(value),
                None => {
                    out.push_str("$(");
                    out.push_str(name);
                    out.push(')');
                }
            }
            rest = tail;
        } else {
            out.push('$');
            rest = after;
        }
    }
    out.push_str(rest);
    out
}

#[cfg(test)]
mod tests {
    use super::*;
    use oci_spec::image::ConfigBuilder;

    fn words(list: &[&str]) -> Vec<String> {
        list.iter().map(ToString::to_string).collect()
    }

    #[test]
    fn expansion_follows_kubernetes() {
        let known = HashMap::from([
            ("A".to_owned(), "1".to_owned()),
            ("VAR".to_owned(), "$(A)".to_owned()),
            ("EMPTY".to_owned(), String::new()),
        ]);
        for (input, expected) in [
            ("", ""),
            ("$(A)", "1"),
            ("x$(A)y$(A)", "x1y1"),
            ("$(VAR)", "$(A)"),
            ("$$(A)", "$(A)"),
            ("$$$(A)", "$1"),
            ("$$$$", "$$"),
            ("$(NONE)", "$(NONE)"),
            ("$(EMPTY)", ""),
            ("$A", "$A"),
            ("$", "$"),
            ("$(A", "$(A"),
            ("$(A$(A))", "$(A$(A))"),
            ("ü$(A)ü$", "ü1ü$"),
            ("$ü$(A)", "$ü1"),
        ] {
            assert_eq!(expand(input, &known), expected, "{input:?}");
        }
    }

    fn literal(name: &str, value: &str) -> v1::EnvVar {
        v1::EnvVar {
            name: name.into(),
            value: Some(v1::env_var::Value::Literal(value.into())),
        }
    }

    #[test]
    fn variables_see_earlier_ones_only() {
        let env = [
            literal("LATE", "$(B)"),
            literal("B", "b"),
            literal("C", "$(B)c"),
            v1::EnvVar {
                name: "IP".into(),
                value: Some(v1::env_var::Value::HostField(v1::HostField::PodIp as i32)),
            },
            literal("URL", "http://$(IP)"),
        ];
        let host = HostValues {
            pod_ip: Some("10.64.0.2".parse().unwrap()),
            host_ip: None,
        };
        let values: Vec<String> = resolve(&env, &host).into_iter().map(|(_, v)| v).collect();
        assert_eq!(values, ["$(B)", "b", "bc", "10.64.0.2", "http://10.64.0.2"]);
    }

    #[test]
    fn pod_overrides_image_overrides_defaults() {
        let image = ConfigBuilder::default()
            .env(words(&["PATH=/bin", "X=image", "BARE"]))
            .build()
            .unwrap();
        let own = [("X".to_owned(), "pod".to_owned())];
        assert_eq!(
            environment(Some(&image), &own, "h", true),
            ["PATH=/bin", "TERM=xterm", "HOSTNAME=h", "X=pod"]
        );
        assert_eq!(
            environment(None, &[], "h", false),
            [DEFAULT_PATH, "HOSTNAME=h"]
        );
    }

    #[test]
    fn command_and_args_replace_entrypoint_and_cmd() {
        let image = ConfigBuilder::default()
            .entrypoint(words(&["/entry"]))
            .cmd(words(&["cmd"]))
            .build()
            .unwrap();
        let own = [("A".to_owned(), "1".to_owned())];
        for (command, args, expected) in [
            (&[][..], &[][..], &["/entry", "cmd"][..]),
            (&[], &["a"], &["/entry", "a"]),
            (&["c"], &[], &["c"]),
            (&["c", "$(A)"], &["$$(A)"], &["c", "1", "$(A)"]),
        ] {
            let container = v1::Container {
                command: words(command),
                args: words(args),
                ..Default::default()
            };
            assert_eq!(
                command_line(&container, Some(&image), &own).unwrap(),
                expected
            );
        }
        assert!(command_line(&v1::Container::default(), None, &[]).is_err());
    }
}
