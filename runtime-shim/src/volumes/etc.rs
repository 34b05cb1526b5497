//! Contents of `/etc/hosts`, `/etc/hostname` and `/etc/resolv.conf`, as the
//! kubelet and containerd write them. Pure but for the host's own resolv.conf.

use std::fs;
use std::io::{self, Read as _};
use std::net::IpAddr;
use std::path::Path;

use sandman_protocol::v1;

use super::VolumeError;

/// Limits of the kubelet; resolvers ignore what is beyond.
const MAX_NAMESERVERS: usize = 3;
const MAX_SEARCHES: usize = 32;
const MAX_SEARCH_CHARS: usize = 2048;

/// The host's own names; more than this is no list of hosts.
const HOST_HOSTS: &str = "/etc/hosts";
const MAX_HOST_HOSTS: u64 = 1 << 20;
const HOST_RESOLV_CONF: &str = "/etc/resolv.conf";
/// Where systemd-resolved keeps the servers behind its local stub.
const HOST_RESOLVED_CONF: &str = "/run/systemd/resolve/resolv.conf";

/// What the managed files below `/etc` are made from.
#[derive(Clone, Debug, Default)]
pub struct EtcFiles {
    /// Hostname of the pod.
    pub hostname: String,
    /// The pod is in the host's network, and so knows the names that the host knows.
    pub host_network: bool,
    /// Fully qualified name, or empty.
    pub fqdn: String,
    /// Address of the pod.
    pub pod_ip: Option<IpAddr>,
    /// Further lines of `/etc/hosts`.
    pub aliases: Vec<v1::HostAlias>,
    /// Contents of `/etc/resolv.conf`.
    pub dns: v1::Dns,
}

pub(super) struct Contents {
    pub(super) hosts: String,
    pub(super) hostname: String,
    pub(super) resolv_conf: String,
}

impl EtcFiles {
    pub(super) fn contents(&self) -> Result<Contents, VolumeError> {
        word("hostname", &self.hostname)?;
        let host = if self.dns.from_host {
            host_resolv_conf()
        } else {
            ResolvConf::default()
        };
        Ok(Contents {
            hosts: self.hosts()?,
            hostname: format!("{}\n", self.hostname),
            resolv_conf: host.extended_by(&self.dns)?.to_text(),
        })
    }

    fn hosts(&self) -> Result<String, VolumeError> {
        let mut text = if self.host_network {
            let own = host_hosts().map_err(VolumeError::io(format!("read {HOST_HOSTS}")))?;
            format!("# Kubernetes-managed hosts file (host network).\n{own}")
        } else {
            self.managed_hosts()?
        };
        if !self.aliases.is_empty() {
            text.push_str("\n# Entries added by HostAliases.\n");
        }
        for alias in &self.aliases {
            let _: IpAddr = alias.ip.parse().map_err(|_| {
                VolumeError::Invalid(format!("host_aliases: {:?} is no address", alias.ip))
            })?;
            for name in &alias.hostnames {
                word("host_aliases", name)?;
            }
            text.push_str(&format!("{}\t{}\n", alias.ip, alias.hostnames.join("\t")));
        }
        Ok(text)
    }

    fn managed_hosts(&self) -> Result<String, VolumeError> {
        let mut text = String::from(
            "# Kubernetes-managed hosts file.\n\
             127.0.0.1\tlocalhost\n\
             ::1\tlocalhost ip6-localhost ip6-loopback\n\
             fe00::0\tip6-localnet\n\
             fe00::0\tip6-mcastprefix\n\
             fe00::1\tip6-allnodes\n\
             fe00::2\tip6-allrouters\n",
        );
        if let Some(ip) = self.pod_ip {
            let names = if self.fqdn.is_empty() {
                self.hostname.clone()
            } else {
                format!("{}\t{}", word("fqdn", &self.fqdn)?, self.hostname)
            };
            text.push_str(&format!("{ip}\t{names}\n"));
        }
        Ok(text)
    }
}

/// Refuses what would end a line or begin another entry.
fn word<'a>(field: &str, text: &'a str) -> Result<&'a str, VolumeError> {
    let plain = |c: char| !c.is_whitespace() && !c.is_control() && c != '#';
    if !text.is_empty() && text.chars().all(plain) {
        return Ok(text);
    }
    Err(VolumeError::Invalid(format!(
        "{field}: {text:?} is not a single word"
    )))
}

#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct ResolvConf {
    servers: Vec<String>,
    searches: Vec<String>,
    options: Vec<String>,
}

impl ResolvConf {
    fn parse(text: &str) -> Self {
        let mut parsed = Self::default();
        for line in text.lines() {
            let line = line.split(['#', ';']).next().unwrap_or_default();
            let mut words = line.split_whitespace().map(str::to_owned);
            match words.next().as_deref() {
                Some("nameserver") => parsed.servers.extend(words.next()),
                // The last of several lines counts.
                Some("search" | "domain") => parsed.searches = words.collect(),
                Some("options") => parsed.options.extend(words),
                _ => {}
            }
        }
        parsed
    }

    /// Adds a pod's own settings behind these. A pod's option replaces one of
    /// the same name.
    fn extended_by(mut self, dns: &v1::Dns) -> Result<Self, VolumeError> {
        for server in &dns.servers {
            push_new(&mut self.servers, word("dns.servers", server)?);
        }
        for search in &dns.searches {
            push_new(&mut self.searches, word("dns.searches", search)?);
        }
        for option in &dns.options {
            let name = |option: &str| option.split(':').next().unwrap_or_default().to_owned();
            let new = name(word("dns.options", option)?);
            self.options.retain(|present| name(present) != new);
            self.options.push(option.clone());
        }
        self.servers.truncate(MAX_NAMESERVERS);
        self.searches.truncate(MAX_SEARCHES);
        while self.searches.join(" ").len() > MAX_SEARCH_CHARS {
            self.searches.pop();
        }
        Ok(self)
    }

    fn to_text(&self) -> String {
        let mut text = String::new();
        if !self.searches.is_empty() {
            text.push_str(&format!("search {}\n", self.searches.join(" ")));
        }
        for server in &self.servers {
            text.push_str(&format!("nameserver {server}\n"));
        }
        if !self.options.is_empty() {
            text.push_str(&format!("options {}\n", self.options.join(" ")));
        }
        text
    }

    /// A pod's own loopback answers no queries.
    fn only_loopback(&self) -> bool {
        let loopback = |server: &String| {
            server
                .parse::<IpAddr>()
                .is_ok_and(|server| server.is_loopback())
        };
        !self.servers.is_empty() && self.servers.iter().all(loopback)
    }
}

fn push_new(list: &mut Vec<String>, item: &str) {
    if !list.iter().any(|present| present == item) {
        list.push(item.to_owned());
    }
}

/// What the host's names are; a host may have no such file.
fn host_hosts() -> io::Result<String> {
    let file = match fs::File::open(HOST_HOSTS) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(String::new()),
        other => other?,
    };
    let mut text = String::new();
    file.take(MAX_HOST_HOSTS).read_to_string(&mut text)?;
    Ok(text)
}

fn host_resolv_conf() -> ResolvConf {
    // A host without either has no resolver to share.
    let read = |path| ResolvConf::parse(&fs::read_to_string(path).unwrap_or_default());
    let own = read(HOST_RESOLV_CONF);
    if own.only_loopback() {
        let resolved = read(HOST_RESOLVED_CONF);
        if !resolved.servers.is_empty() {
            return resolved;
        }
    }
    own
}

/// Whether a file holds exactly `content`. Containers can write to it: however large they made
/// it, no more than that much is read.
pub(super) fn holds(path: &Path, content: &str) -> io::Result<bool> {
    let file = fs::File::open(path)?;
    let wanted = content.len() as u64;
    if file.metadata()?.len() != wanted {
        return Ok(false);
    }
    let mut present = Vec::with_capacity(content.len() + 1);
    // One byte more shows that it grew meanwhile.
    file.take(wanted + 1).read_to_end(&mut present)?;
    Ok(present == content.as_bytes())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn texts(list: &[&str]) -> Vec<String> {
        list.iter().map(|text| (*text).to_owned()).collect()
    }

    #[test]
    fn hosts_are_written_as_the_kubelet_does() {
        let mut etc = EtcFiles {
            hostname: "web-0".to_owned(),
            pod_ip: "10.64.0.5".parse().ok(),
            ..EtcFiles::default()
        };
        assert!(
            etc.hosts()
                .unwrap()
                .ends_with("fe00::2\tip6-allrouters\n10.64.0.5\tweb-0\n")
        );
        etc.fqdn = "web-0.web.ns.svc.cluster.local".to_owned();
        etc.aliases = vec![v1::HostAlias {
            ip: "123.45.67.89".to_owned(),
            hostnames: texts(&["foo", "bar"]),
        }];
        let expected = "10.64.0.5\tweb-0.web.ns.svc.cluster.local\tweb-0\n\n\
                        # Entries added by HostAliases.\n123.45.67.89\tfoo\tbar\n";
        assert!(etc.hosts().unwrap().ends_with(expected));
        assert!(
            etc.hosts()
                .unwrap()
                .starts_with("# Kubernetes-managed hosts file.\n")
        );
    }

    #[test]
    fn a_pod_in_the_hosts_network_knows_the_hosts_names() {
        let etc = EtcFiles {
            hostname: "host".to_owned(),
            host_network: true,
            pod_ip: "10.90.0.11".parse().ok(),
            aliases: vec![v1::HostAlias {
                ip: "123.45.67.89".to_owned(),
                hostnames: texts(&["foo"]),
            }],
            ..EtcFiles::default()
        };
        let expected = format!(
            "# Kubernetes-managed hosts file (host network).\n{}\n\
             # Entries added by HostAliases.\n123.45.67.89\tfoo\n",
            host_hosts().unwrap()
        );
        assert_eq!(etc.hosts().unwrap(), expected);
    }

    #[test]
    fn nothing_can_smuggle_in_a_line() {
        let alias = |ip: &str, name: &str| EtcFiles {
            hostname: "a".to_owned(),
            aliases: vec![v1::HostAlias {
                ip: ip.to_owned(),
                hostnames: texts(&[name]),
            }],
            ..EtcFiles::default()
        };
        assert!(alias("1.2.3.4\n5.6.7.8", "x").hosts().is_err());
        assert!(alias("1.2.3.4", "x\n5.6.7.8 y").hosts().is_err());
        assert!(
            EtcFiles {
                hostname: "a\nb".to_owned(),
                ..EtcFiles::default()
            }
            .contents()
            .is_err()
        );
        let dns = v1::Dns {
            servers: texts(&["10.0.0.1\noptions debug"]),
            ..Default::default()
        };
        assert!(ResolvConf::default().extended_by(&dns).is_err());
    }

    #[test]
    fn pods_settings_follow_the_hosts() {
        let host = "# comment\nnameserver 10.0.0.1\nsearch example.com\noptions ndots:1 rotate\n";
        let dns = v1::Dns {
            servers: texts(&["10.0.0.1", "10.0.0.2"]),
            searches: texts(&["ns.svc.cluster.local"]),
            options: texts(&["ndots:5"]),
            from_host: true,
        };
        let text = ResolvConf::parse(host).extended_by(&dns).unwrap().to_text();
        let expected = "search example.com ns.svc.cluster.local\nnameserver 10.0.0.1\n\
                        nameserver 10.0.0.2\noptions rotate ndots:5\n";
        assert_eq!(text, expected);
    }

    #[test]
    fn keeps_the_limits() {
        let dns = v1::Dns {
            servers: (0..9).map(|n| format!("10.0.0.{n}")).collect(),
            searches: (0..99).map(|n| format!("{n}{}", "x".repeat(100))).collect(),
            ..Default::default()
        };
        let limited = ResolvConf::default().extended_by(&dns).unwrap();
        assert_eq!(limited.servers.len(), 3);
        assert!(limited.searches.join(" ").len() <= 2048 && limited.searches.len() > 15);
    }

    #[test]
    fn a_file_that_grew_is_not_read_whole() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("hosts");
        assert!(holds(&path, "text").is_err());
        for (present, expected) in [
            ("text", true),
            ("test", false),
            ("texts", false),
            ("", false),
        ] {
            fs::write(&path, present).unwrap();
            assert_eq!(holds(&path, "text").unwrap(), expected, "{present:?}");
        }
        // A sparse giant costs nothing.
        let file = fs::File::options().write(true).open(&path).unwrap();
        file.set_len(1 << 40).unwrap();
        assert!(!holds(&path, "text").unwrap());
    }

    #[test]
    fn knows_a_local_stub() {
        assert!(ResolvConf::parse("nameserver 127.0.0.53").only_loopback());
        assert!(!ResolvConf::parse("nameserver 127.0.0.53\nnameserver 10.0.0.1").only_loopback());
        assert!(!ResolvConf::parse("").only_loopback());
    }
}
