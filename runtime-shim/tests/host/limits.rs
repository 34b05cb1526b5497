//! What the host's limits have room for is what it offers, and it says so.

use std::io::{Read, Write};
use std::net::TcpStream;

use crate::support::{METRICS, TestHost, on_a_host};

/// Value of a metric that this service serves.
fn metric(name: &str) -> Option<f64> {
    let mut stream = TcpStream::connect(METRICS).unwrap();
    stream
        .write_all(b"GET /metrics HTTP/1.1\r\nHost: host\r\nConnection: close\r\n\r\n")
        .unwrap();
    let mut text = String::new();
    stream.read_to_string(&mut text).unwrap();
    let value = text
        .lines()
        .find_map(|line| line.strip_prefix(name)?.strip_prefix(' '))?;
    Some(value.parse().unwrap())
}

fn restart(host: &mut TestHost, nofile: u32) {
    host.kill_shim();
    host.kill_containerd();
    host.start_containerd_with(Some(nofile));
    host.wait_for_containerd();
    host.start_shim();
}

#[test]
#[ignore = "needs root, containerd, runc and the built agent"]
fn a_host_offers_what_its_limits_hold() {
    on_a_host(|mut host| async move {
        // All addresses of its /24 but two.
        let offered = async |host: &TestHost| {
            let inventory = host.node().await.wait_inventory().await;
            inventory.capacity.unwrap().pods
        };
        host.wait_for_containerd();
        assert_eq!(offered(&host).await, 254);
        let pid_max = metric("sandman_host_limit{limit=\"kernel.pid_max\"}").unwrap();
        let needed = metric("sandman_host_limit_needed{limit=\"kernel.pid_max\"}").unwrap();
        assert!(pid_max >= needed, "{pid_max} of {needed}");

        restart(&mut host, 1500);
        assert_eq!(offered(&host).await, (1500 - 1024) / 3);
        let nofile = metric("sandman_host_limit{limit=\"nofile of containerd\"}");
        assert_eq!(nofile, Some(1500.0));
        let logs = host.logs();
        for words in ["LimitNOFILE=1786", "offers fewer pods"] {
            assert!(logs.contains(words), "{words:?} is not in {logs}");
        }
    });
}
