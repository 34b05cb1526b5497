//! Against the kernel, in namespaces of the test's own; these need root and
//! say so when skipped.

use std::io::Read as _;
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::os::unix::fs::MetadataExt as _;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use nix::mount::{MsFlags, mount};
use nix::sched::{CloneFlags, setns, unshare};

use super::netlink::route::{Route, VethPair};
use super::*;

pub(super) const UID_A: &str = "0a1b2c3d-0000-4000-8000-00000000000a";
pub(super) const UID_B: &str = "0a1b2c3d-0000-4000-8000-00000000000b";

/// Runs a test on a thread, and a runtime, whose network and mounts are its own.
pub(super) fn in_own_namespaces<F: Future<Output = ()>>(test: impl FnOnce(PathBuf) -> F + Send) {
    if !nix::unistd::geteuid().is_root() {
        eprintln!("skipped: needs root");
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    std::thread::scope(|scope| {
        let thread = scope.spawn(|| {
            unshare(CloneFlags::CLONE_NEWNET | CloneFlags::CLONE_NEWNS).unwrap();
            let none: Option<&str> = None;
            mount(none, "/", none, MsFlags::MS_REC | MsFlags::MS_PRIVATE, none).unwrap();
            let runtime = tokio::runtime::Builder::new_current_thread()
                .enable_all()
                .build();
            runtime.unwrap().block_on(test(folder.path().to_owned()));
        });
        thread.join().unwrap();
    });
}

pub(super) fn config(state_dir: &Path) -> NetworkConfig {
    NetworkConfig {
        state_dir: state_dir.to_owned(),
        pod_cidr: "10.64.0.0/28".parse().unwrap(),
        cluster_cidrs: vec![
            "10.64.0.0/16".parse().unwrap(),
            "10.96.0.0/16".parse().unwrap(),
        ],
        closed_ports: vec![7443],
    }
}

/// Runs `work` on a thread inside the namespace at `path`.
pub(super) fn inside<T: Send>(path: &Path, work: impl FnOnce() -> T + Send) -> T {
    let namespace = std::fs::File::open(path).unwrap();
    std::thread::scope(|scope| {
        let thread = scope.spawn(move || {
            setns(namespace, CloneFlags::empty()).unwrap();
            work()
        });
        thread.join().unwrap()
    })
}

pub(super) fn connect(address: SocketAddr) -> io::Result<TcpStream> {
    TcpStream::connect_timeout(&address, Duration::from_secs(20))
}

#[test]
fn pods_reach_each_other_and_not_the_closed_port() {
    in_own_namespaces(|folder| async move {
        let network = Network::start(config(&folder)).await.unwrap();
        let a = network
            .setup(UID_A, v1::NetworkMode::Pod, "pod-a", &[])
            .await
            .unwrap();
        let b = network
            .setup(UID_B, v1::NetworkMode::Pod, "pod-b", &[])
            .await
            .unwrap();
        let (address_a, address_b) = (a.ip.unwrap(), b.ip.unwrap());
        assert_ne!(address_a, address_b);

        let listener = inside(&b.netns, || TcpListener::bind("0.0.0.0:80").unwrap());
        inside(&a.netns, || connect((address_b, 80).into()).unwrap());
        let (_, peer) = listener.accept().unwrap();
        assert_eq!(
            peer.ip(),
            address_a,
            "inside the cluster pods keep their address"
        );

        // The host, reached by any address of its own.
        let run =
            |args: &[&str]| assert!(Command::new("ip").args(args).status().unwrap().success());
        run(&["link", "set", "lo", "up"]);
        run(&["addr", "add", "192.0.2.1/32", "dev", "lo"]);
        let _open = TcpListener::bind("0.0.0.0:7444").unwrap();
        let _closed = TcpListener::bind("0.0.0.0:7443").unwrap();
        let host: IpAddr = "192.0.2.1".parse().unwrap();
        inside(&a.netns, || {
            connect((host, 7444).into()).unwrap();
            let closed = SocketAddr::new(host, 7443);
            // Long enough for any answer between two namespaces.
            let refused = TcpStream::connect_timeout(&closed, Duration::from_secs(1)).unwrap_err();
            assert_eq!(refused.kind(), io::ErrorKind::TimedOut);
        });
        connect((host, 7443).into()).unwrap();

        let hostname = inside(&a.utsns, || nix::unistd::gethostname().unwrap());
        assert_eq!(hostname, "pod-a");
    });
}

#[test]
fn a_forged_source_address_goes_nowhere() {
    in_own_namespaces(|folder| async move {
        let network = Network::start(config(&folder)).await.unwrap();
        let a = network
            .setup(UID_A, v1::NetworkMode::Pod, "a", &[])
            .await
            .unwrap();
        let b = network
            .setup(UID_B, v1::NetworkMode::Pod, "b", &[])
            .await
            .unwrap();
        let receiver = inside(&b.netns, || {
            std::net::UdpSocket::bind("0.0.0.0:53").unwrap()
        });
        receiver
            .set_read_timeout(Some(Duration::from_secs(5)))
            .unwrap();
        let target = SocketAddr::new(b.ip.unwrap(), 53);
        inside(&a.netns, || {
            let mut socket = Socket::route().unwrap();
            let link = socket.link("eth0").unwrap().unwrap();
            let forged = Ipv4Addr::new(10, 64, 0, 14);
            socket.add_address(link.index, forged).unwrap();
            let forger = std::net::UdpSocket::bind((forged, 0)).unwrap();
            forger.send_to(b"forged", target).unwrap();
            let honest = std::net::UdpSocket::bind((a.ip.unwrap(), 0)).unwrap();
            honest.send_to(b"honest", target).unwrap();
        });
        // Both took the same path in this order; only one arrived.
        let mut buffer = [0; 16];
        let (length, from) = receiver.recv_from(&mut buffer).unwrap();
        assert_eq!(
            (&buffer[..length], from.ip()),
            (&b"honest"[..], a.ip.unwrap())
        );
    });
}

#[test]
fn traffic_out_of_the_cluster_is_masqueraded() {
    in_own_namespaces(|folder| async move {
        let network = Network::start(config(&folder)).await.unwrap();
        let pod = network
            .setup(UID_A, v1::NetworkMode::Pod, "a", &[])
            .await
            .unwrap();
        // A neighbour outside: a namespace with an uplink of its own.
        let outside = network
            .setup(UID_B, v1::NetworkMode::None, "b", &[])
            .await
            .unwrap();
        let namespace = std::fs::File::open(&outside.netns).unwrap();
        let mut socket = Socket::route().unwrap();
        let pair = VethPair {
            name: "uplink",
            mac: [2, 0, 0, 0, 0, 1],
            peer_name: "uplink",
            peer_mac: [2, 0, 0, 0, 0, 2],
            peer_namespace: std::os::fd::AsFd::as_fd(&namespace),
        };
        socket.create_veth(&pair).unwrap();
        let (here, there) = (Ipv4Addr::new(192, 0, 2, 1), Ipv4Addr::new(192, 0, 2, 2));
        let attach = |own: Ipv4Addr, peer: Ipv4Addr| {
            let mut socket = Socket::route().unwrap();
            let index = socket.link("uplink").unwrap().unwrap().index;
            socket.set_up(index).unwrap();
            socket.add_address(index, own).unwrap();
            let destination = Ipv4Cidr::host(peer);
            let route = Route {
                destination,
                via: None,
                link: Some(index),
                protocol: 4,
            };
            socket.put_route(&route).unwrap();
        };
        attach(here, there);
        let listener = inside(&outside.netns, || {
            attach(there, here);
            TcpListener::bind("0.0.0.0:80").unwrap()
        });
        let mut client = inside(&pod.netns, || connect((there, 80).into()).unwrap());
        let (stream, peer) = listener.accept().unwrap();
        assert_eq!(peer.ip(), IpAddr::V4(here));
        drop(stream);
        assert_eq!(client.read(&mut [0]).unwrap(), 0);
    });
}

#[test]
fn addresses_are_learnt_from_the_kernel() {
    in_own_namespaces(|folder| async move {
        let network = Network::start(config(&folder)).await.unwrap();
        let a = network
            .setup(UID_A, v1::NetworkMode::Pod, "a", &[])
            .await
            .unwrap();
        assert_eq!(
            network
                .setup(UID_A, v1::NetworkMode::Pod, "a", &[])
                .await
                .unwrap(),
            a
        );
        drop(network);

        let network = Network::start(config(&folder)).await.unwrap();
        assert_eq!(network.list().await.unwrap(), [UID_A]);
        assert_eq!(
            network
                .setup(UID_A, v1::NetworkMode::Pod, "a", &[])
                .await
                .unwrap(),
            a
        );
        let b = network
            .setup(UID_B, v1::NetworkMode::Pod, "b", &[])
            .await
            .unwrap();
        assert_ne!(a.ip, b.ip);
    });
}

#[test]
fn a_pod_that_runs_keeps_its_namespaces_and_address() {
    in_own_namespaces(|folder| async move {
        let network = Network::start(config(&folder)).await.unwrap();
        let a = network
            .setup(UID_A, v1::NetworkMode::Pod, "a", &[])
            .await
            .unwrap();
        let address = a.ip.unwrap();
        let namespace = || std::fs::metadata(&a.netns).unwrap().ino();
        let (before, link) = (namespace(), pod::link_name(UID_A));
        let listener = inside(&a.netns, || TcpListener::bind("0.0.0.0:80").unwrap());
        let route = address.to_string();
        for damage in [["route", "del", &route], ["link", "del", &link]] {
            assert!(Command::new("ip").args(damage).status().unwrap().success());
            // As the next process does, with what the records say.
            let network = Network::start(config(&folder)).await.unwrap();
            assert!(network.keep(UID_A, address));
            let b = network
                .setup(UID_B, v1::NetworkMode::Pod, "b", &[])
                .await
                .unwrap();
            assert_ne!(b.ip, a.ip);
            assert_eq!(
                network
                    .setup(UID_A, v1::NetworkMode::Pod, "a", &[])
                    .await
                    .unwrap(),
                a
            );
            assert_eq!(namespace(), before);
            inside(&b.netns, || connect((address, 80).into()).unwrap());
            listener.accept().unwrap();
            network.teardown(UID_B).await.unwrap();
        }
    });
}

#[test]
fn what_a_crash_left_half_made_is_made_anew() {
    in_own_namespaces(|folder| async move {
        let network = Network::start(config(&folder)).await.unwrap();
        network
            .setup(UID_A, v1::NetworkMode::Pod, "a", &[])
            .await
            .unwrap();
        // The last pin was not made yet.
        nix::mount::umount(&folder.join("netns").join(UID_A).join("ipc")).unwrap();
        let network = Network::start(config(&folder)).await.unwrap();
        let again = network
            .setup(UID_A, v1::NetworkMode::Pod, "a", &[])
            .await
            .unwrap();
        let routes = Socket::route().unwrap().routes().unwrap();
        assert!(
            routes
                .iter()
                .any(|route| again.ip == Some(IpAddr::V4(route.destination.network())))
        );
    });
}

#[test]
fn teardown_leaves_nothing_and_may_be_repeated() {
    in_own_namespaces(|folder| async move {
        let network = Network::start(config(&folder)).await.unwrap();
        network.teardown(UID_A).await.unwrap();
        for mode in [v1::NetworkMode::Pod, v1::NetworkMode::None] {
            let pod = network.setup(UID_A, mode, "a", &[]).await.unwrap();
            let links = inside(&pod.netns, || Socket::route().unwrap().links().unwrap());
            let names: Vec<_> = links.iter().map(|link| link.name.as_str()).collect();
            let with_link = mode == v1::NetworkMode::Pod;
            assert_eq!(names.contains(&"eth0"), with_link, "{names:?}");
            assert_eq!(pod.ip.is_some(), with_link);
            network.teardown(UID_A).await.unwrap();
            network.teardown(UID_A).await.unwrap();
            assert!(network.list().await.unwrap().is_empty());
            let mut socket = Socket::route().unwrap();
            assert_eq!(socket.link(&pod::link_name(UID_A)).unwrap(), None);
        }
    });
}

#[test]
fn all_addresses_serve_again_and_their_lack_is_clear() {
    in_own_namespaces(|folder| async move {
        let mut config = config(&folder);
        config.pod_cidr = "10.64.0.0/30".parse().unwrap();
        let network = Network::start(config).await.unwrap();
        for round in 0..2 {
            for pod in 0..2 {
                let uid = format!("{round}-{pod}");
                network
                    .setup(&uid, v1::NetworkMode::Pod, "a", &[])
                    .await
                    .unwrap();
            }
            let error = network
                .setup("more", v1::NetworkMode::Pod, "a", &[])
                .await
                .unwrap_err();
            assert!(
                error.to_string().contains("pod_cidr 10.64.0.0/30"),
                "{error}"
            );
            assert_eq!(network.list().await.unwrap().len(), 2);
            for pod in 0..2 {
                network.teardown(&format!("{round}-{pod}")).await.unwrap();
            }
        }
    });
}

#[test]
fn the_kernel_reads_the_rules_as_meant() {
    in_own_namespaces(|folder| async move {
        // Twice: replaced, not added to.
        for _ in 0..2 {
            Network::start(config(&folder)).await.unwrap();
        }
        let output = Command::new("nft")
            .args(["list", "ruleset"])
            .output()
            .unwrap();
        assert!(output.status.success());
        let expected = r#"table inet sandman {
	chain from-pod {
		type filter hook prerouting priority raw; policy accept;
		iifname "sm*" meta nfproto ipv6 drop
		iifname "sm*" fib saddr . iif oif 0 drop
	}

	chain to-host {
		type filter hook input priority filter; policy accept;
		iifname "sm*" tcp dport 7443 drop
	}

	chain egress {
		type nat hook postrouting priority srcnat; policy accept;
		ip saddr 10.64.0.0/28 ip daddr 10.64.0.0/16 return
		ip saddr 10.64.0.0/28 ip daddr 10.96.0.0/16 return
		ip saddr 10.64.0.0/28 ip daddr 10.64.0.0/28 return
		ip saddr 10.64.0.0/28 masquerade
	}
}
"#;
        assert_eq!(String::from_utf8(output.stdout).unwrap(), expected);
    });
}

#[test]
fn ports_of_the_host_lead_to_pods_and_go_with_them() {
    in_own_namespaces(|folder| async move {
        let run =
            |args: &[&str]| assert!(Command::new("ip").args(args).status().unwrap().success());
        run(&["link", "set", "lo", "up"]);
        run(&["addr", "add", "192.0.2.1/32", "dev", "lo"]);
        run(&["addr", "add", "192.0.2.2/32", "dev", "lo"]);
        let network = Network::start(config(&folder)).await.unwrap();
        let ports = [
            v1::HostPort {
                host_ip: String::new(),
                host_port: 8080,
                container_port: 80,
                protocol: "TCP".into(),
            },
            v1::HostPort {
                host_ip: "192.0.2.2".into(),
                host_port: 8081,
                container_port: 80,
                protocol: "TCP".into(),
            },
        ];
        let a = network
            .setup(UID_A, v1::NetworkMode::Pod, "a", &ports)
            .await
            .unwrap();
        let b = network
            .setup(UID_B, v1::NetworkMode::Pod, "b", &[])
            .await
            .unwrap();
        let _listener = inside(&a.netns, || TcpListener::bind("0.0.0.0:80").unwrap());
        let [first, second]: [IpAddr; 2] = ["192.0.2.1", "192.0.2.2"].map(|ip| ip.parse().unwrap());
        // From another pod, from the host itself, and from the pod that has the port.
        inside(&b.netns, || connect((first, 8080).into()).unwrap());
        connect((second, 8080).into()).unwrap();
        connect((second, 8081).into()).unwrap();
        inside(&a.netns, || connect((first, 8080).into()).unwrap());
        let refused = connect((first, 8081).into()).unwrap_err();
        assert_eq!(refused.kind(), io::ErrorKind::ConnectionRefused);

        // Another process of this service knows it from the records.
        let again = Network::start(config(&folder)).await.unwrap();
        let IpAddr::V4(address) = a.ip.unwrap() else {
            panic!("not IPv4");
        };
        again
            .keep_ports([(UID_A, address, &ports[..])].into_iter())
            .unwrap();
        connect((second, 8081).into()).unwrap();
        again.teardown(UID_A).await.unwrap();
        let refused = connect((second, 8080).into()).unwrap_err();
        assert_eq!(refused.kind(), io::ErrorKind::ConnectionRefused);
        let output = Command::new("nft").args(["list", "tables"]).output();
        let tables = String::from_utf8(output.unwrap().stdout).unwrap();
        assert_eq!(tables, "table inet sandman\n");
    });
}
