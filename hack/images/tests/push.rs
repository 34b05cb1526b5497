//! Builds the scratch image and pushes it to a real registry.
#![allow(clippy::unwrap_used)] // helpers of tests may panic like tests

use std::fs;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use serde_json::Value;
use tempfile::TempDir;

const DEADLINE: Duration = Duration::from_secs(30);

/// `name:word`, the password as the registry's bcrypt wants it.
const HTPASSWD: &str = "name:$2y$05$r9ChBLLuvfb9poRyqHF83eWzFhB0.wfMlY/1QhfWaHlhdFES3DDp.";
const BASIC: &str = "Authorization: Basic bmFtZTp3b3Jk\r\n";

fn images(args: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_sandman-images"))
        .args(args)
        .output()
        .unwrap()
}

fn succeed(args: &[&str]) -> String {
    let output = images(args);
    let stderr = String::from_utf8(output.stderr).unwrap();
    assert!(output.status.success(), "{args:?}: {stderr}");
    stderr
}

/// A registry on loopback with a folder of its own.
struct Registry {
    child: Child,
    address: SocketAddr,
    _folder: TempDir,
}

impl Registry {
    fn start(htpasswd: Option<&str>) -> Self {
        let folder = tempfile::tempdir().unwrap();
        // The registry cannot say which port it was given, so one is picked here.
        let address = TcpListener::bind((Ipv4Addr::LOCALHOST, 0))
            .unwrap()
            .local_addr()
            .unwrap();
        let at = |name: &str| folder.path().join(name);
        let mut config = format!(
            "version: 0.1\nstorage: {{filesystem: {{rootdirectory: {}}}}}\nhttp: {{addr: '{address}'}}\n",
            at("data").display()
        );
        if let Some(text) = htpasswd {
            fs::write(at("htpasswd"), text).unwrap();
            let path = at("htpasswd");
            config += &format!(
                "auth: {{htpasswd: {{realm: test, path: {}}}}}\n",
                path.display()
            );
        }
        fs::write(at("config.yml"), config).unwrap();
        let mut child = Command::new("docker-registry")
            .arg("serve")
            .arg(at("config.yml"))
            .stdout(Stdio::null())
            .stderr(Stdio::piped())
            .spawn()
            .expect("needs Debian's docker-registry");
        let mut log = BufReader::new(child.stderr.take().unwrap()).lines();
        let start = Instant::now();
        while !log.next().unwrap().unwrap().contains("listening on") {
            assert!(start.elapsed() < DEADLINE, "the registry does not start");
        }
        // A full pipe would stop it.
        thread::spawn(move || log.for_each(drop));
        Self {
            child,
            address,
            _folder: folder,
        }
    }

    fn get(&self, path: &str, headers: &str) -> (u16, Vec<u8>) {
        let mut stream = TcpStream::connect(self.address).unwrap();
        stream.set_read_timeout(Some(DEADLINE)).unwrap();
        write!(stream, "GET {path} HTTP/1.0\r\n{headers}\r\n").unwrap();
        let mut answer = Vec::new();
        stream.read_to_end(&mut answer).unwrap();
        let end = answer
            .windows(4)
            .position(|window| window == b"\r\n\r\n")
            .unwrap()
            + 4;
        let status = String::from_utf8_lossy(&answer[9..12]).parse().unwrap();
        (status, answer.split_off(end))
    }
}

impl Drop for Registry {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn blob(layout: &Path, digest: &Value) -> PathBuf {
    layout
        .join("blobs/sha256")
        .join(digest.as_str().unwrap().trim_start_matches("sha256:"))
}

fn json(path: &Path) -> Value {
    serde_json::from_slice(&fs::read(path).unwrap()).unwrap()
}

/// Builds the scratch image; returns the folder of the layout.
fn built() -> TempDir {
    let folder = tempfile::tempdir().unwrap();
    let out = folder.path().to_str().unwrap();
    let log = succeed(&["build", "--out", out, "--only", "scratch-static"]);
    assert!(log.contains("building"), "{log}");
    folder
}

#[test]
fn what_is_pushed_is_what_was_built() {
    let folder = built();
    let layout = folder.path().to_str().unwrap();
    let registry = Registry::start(None);
    let address = registry.address.to_string();
    let push = [
        "push",
        "--from",
        layout,
        "--registry",
        &address,
        "--plain-http",
    ];
    succeed(&push);

    let index = json(&folder.path().join("index.json"));
    let descriptor = &index["manifests"][0];
    let accept = format!("Accept: {}\r\n", descriptor["mediaType"].as_str().unwrap());
    let (status, manifest) = registry.get("/v2/sandman/scratch-static/manifests/1", &accept);
    assert_eq!(status, 200);
    assert!(manifest == fs::read(blob(folder.path(), &descriptor["digest"])).unwrap());
    let manifest: Value = serde_json::from_slice(&manifest).unwrap();
    for part in [&manifest["config"], &manifest["layers"][0]] {
        let digest = part["digest"].as_str().unwrap();
        let (status, bytes) =
            registry.get(&format!("/v2/sandman/scratch-static/blobs/{digest}"), "");
        assert_eq!(status, 200);
        assert!(bytes == fs::read(blob(folder.path(), &part["digest"])).unwrap());
    }

    // A second push has nothing to send, and a second build nothing to do.
    assert!(succeed(&push).contains("sent_bytes=0"));
    let log = succeed(&["build", "--out", layout, "--only", "scratch-static"]);
    assert!(
        log.contains("unchanged") && !log.contains("building"),
        "{log}"
    );
}

#[test]
fn a_registry_with_a_password() {
    let folder = built();
    let layout = folder.path().to_str().unwrap();
    let registry = Registry::start(Some(HTPASSWD));
    let address = registry.address.to_string();
    let push = [
        "push",
        "--from",
        layout,
        "--registry",
        &address,
        "--plain-http",
    ];

    assert!(!images(&push).status.success());
    let login = |password| [&push[..], &["--user", "name", "--password", password]].concat();
    assert!(!images(&login("wrong")).status.success());
    assert_eq!(
        registry
            .get("/v2/sandman/scratch-static/tags/list", BASIC)
            .0,
        404
    );

    succeed(&login("word"));
    assert_eq!(
        registry
            .get("/v2/sandman/scratch-static/tags/list", BASIC)
            .0,
        200
    );
}

#[test]
fn wrong_calls_say_what_is_wrong() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().to_str().unwrap();
    let output = images(&["build", "--out", path, "--only", "windows"]);
    assert!(!output.status.success());
    let stderr = String::from_utf8(output.stderr).unwrap();
    assert!(
        stderr.contains("--only windows") && stderr.contains("busybox"),
        "{stderr}"
    );

    let output = images(&[
        "push",
        "--from",
        path,
        "--registry",
        "127.0.0.1:1",
        "--plain-http",
    ]);
    assert!(!output.status.success());
    assert!(
        String::from_utf8(output.stderr)
            .unwrap()
            .contains("no image layout")
    );
}
