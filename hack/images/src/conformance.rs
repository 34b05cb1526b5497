//! Stand-ins for the images that Kubernetes' own tests run, under the names and tags that version
//! 1.36 of the tests asks for. They hold what those tests use of the originals, and no more.
//!
//! The originals are Alpine's; these are Debian's, whose busybox differs in two ways that tests
//! notice: its shell prefers its own applets to those in PATH (its `nc` knows no UDP), and drops
//! variables whose names are no identifiers. Hence the shells below.

use crate::catalog::{PATH, busybox_layer, pause, skeleton};
use crate::recipe::{Config, Layer, Part, Recipe};

/// The name under which agnhost, which all its callers build from the tests' own source, is given.
const AGNHOST: &str = "agnhost";
/// The certificate and key of its TLS servers, given likewise; tests name them by path.
const CERTIFICATE: &str = "localhost.crt";
const KEY: &str = "localhost.key";

/// All images, the small ones first.
pub(crate) fn recipes() -> Vec<Recipe> {
    vec![
        pause("pause", "3.10.2"),
        nonewprivs(),
        busybox("1.36.1-1"),
        busybox("1.37.0-1"),
        nonroot(),
        glibc_dns_testing(),
        nginx("1.15-4"),
        nginx("1.27-0"),
        agnhost("2.55"),
        agnhost("2.63.0"),
        web_server("e2e-test-images/kitten", "{\"image\": \"kitten.jpg\"}\n"),
        web_server(
            "e2e-test-images/nautilus",
            "{\"image\": \"nautilus.jpg\"}\n",
        ),
    ]
}

fn busybox(tag: &'static str) -> Recipe {
    Recipe {
        name: "e2e-test-images/busybox",
        tag,
        layers: vec![busybox_layer(), shell_layer()],
        config: Config {
            env: &[PATH],
            cmd: &["sh"],
            ..Config::default()
        },
    }
}

/// busybox's shell, whose messages tests compare, except where it would lose variables.
fn shell_layer() -> Layer {
    Layer {
        created_by: "a shell that keeps all variables",
        parts: vec![
            Part::Packages(&["bash-static"]),
            Part::Program {
                path: "usr/bin/sh",
                mode: 0o755,
                source: include_str!("../programs/shell.rs"),
            },
        ],
    }
}

/// A user that is not root, known by number only.
fn nonroot() -> Recipe {
    let mut recipe = busybox("1.5");
    recipe.name = "e2e-test-images/nonroot";
    recipe.config.user = "1234";
    recipe
}

/// A program with the set-user-ID bit that tells whose rights it has.
fn nonewprivs() -> Recipe {
    Recipe {
        name: "e2e-test-images/nonewprivs",
        tag: "1.4",
        layers: vec![
            busybox_layer(),
            Layer {
                created_by: "a set-user-ID program",
                parts: vec![Part::Program {
                    path: "usr/local/bin/nnp",
                    mode: 0o6755,
                    source: include_str!("../programs/effective_uid.rs"),
                }],
            },
        ],
        config: Config {
            env: &[PATH],
            cmd: &["nnp"],
            ..Config::default()
        },
    }
}

/// Name resolution by glibc.
fn glibc_dns_testing() -> Recipe {
    Recipe {
        name: "e2e-test-images/glibc-dns-testing",
        tag: "2.0.0",
        layers: vec![
            busybox_layer(),
            Layer {
                created_by: "hostname and getent of Debian",
                parts: vec![
                    Part::Packages(&["hostname", "libc-bin"]),
                    Part::File {
                        path: "etc/nsswitch.conf",
                        mode: 0o644,
                        content: "hosts: files dns\n",
                    },
                ],
            },
        ],
        config: Config {
            env: &[PATH],
            cmd: &["sh"],
            ..Config::default()
        },
    }
}

fn nginx(tag: &'static str) -> Recipe {
    Recipe {
        name: "e2e-test-images/nginx",
        tag,
        layers: vec![
            busybox_layer(),
            Layer {
                created_by: "nginx, in the foreground",
                parts: vec![
                    Part::Packages(&["nginx"]),
                    Part::File {
                        path: "etc/nginx/nginx.conf",
                        mode: 0o644,
                        content: include_str!("../programs/nginx.conf"),
                    },
                    Part::File {
                        path: "usr/share/nginx/html/index.html",
                        mode: 0o644,
                        content: "<!DOCTYPE html>\n<title>Welcome to nginx!</title>\n",
                    },
                ],
            },
        ],
        config: Config {
            env: &[PATH],
            cmd: &["nginx"],
            ..Config::default()
        },
    }
}

/// The tests' own program of many servers and clients, and the commands that tests run beside it.
fn agnhost(tag: &'static str) -> Recipe {
    Recipe {
        name: "e2e-test-images/agnhost",
        tag,
        layers: agnhost_layers(),
        config: Config {
            env: &[PATH],
            entrypoint: &["/agnhost"],
            cmd: &["pause"],
            ..Config::default()
        },
    }
}

fn agnhost_layers() -> Vec<Layer> {
    let mut base = skeleton(
        "root:x:0:0:root:/root:/bin/sh\n\
         user-defined-in-image:x:1000:1000::/home:/bin/sh\n\
         nobody:x:65534:65534:nobody:/home:/bin/false\n",
        "root:x:0:\n\
         user-defined-in-image:x:1000:\n\
         group-defined-in-image:x:50000:user-defined-in-image\n\
         nogroup:x:65534:\n",
    );
    base.extend([
        Part::Packages(&["busybox-static"]),
        Part::Applets {
            busybox: "usr/bin/busybox",
        },
        Part::Packages(&[
            "bash-static",
            "ca-certificates",
            "curl",
            "iproute2",
            "netcat-openbsd",
        ]),
        Part::Symlink {
            path: "usr/bin/nc",
            target: "nc.openbsd",
        },
        Part::Symlink {
            path: "usr/bin/sh",
            target: "bash-static",
        },
        Part::Symlink {
            path: "usr/bin/bash",
            target: "bash-static",
        },
    ]);
    let program = vec![
        Part::Directory {
            path: "uploads",
            mode: 0o755,
            owner: 0,
        },
        Part::Supplied {
            path: "agnhost",
            name: AGNHOST,
        },
        Part::Supplied {
            path: CERTIFICATE,
            name: CERTIFICATE,
        },
        Part::Supplied {
            path: KEY,
            name: KEY,
        },
        // Tests of entry points tell one from the other.
        Part::Symlink {
            path: "agnhost-2",
            target: "agnhost",
        },
    ];
    vec![
        Layer {
            created_by: "busybox, bash, curl and netcat",
            parts: base,
        },
        Layer {
            created_by: "agnhost",
            parts: program,
        },
    ]
}

/// Serves a file that tells one version of a deployment from the next.
fn web_server(name: &'static str, data: &'static str) -> Recipe {
    let mut layers = agnhost_layers();
    layers.push(Layer {
        created_by: "what it serves",
        parts: vec![Part::File {
            path: "data.json",
            mode: 0o644,
            content: data,
        }],
    });
    Recipe {
        name,
        tag: "1.8",
        layers,
        config: Config {
            env: &[PATH],
            entrypoint: &["/agnhost"],
            cmd: &["test-webserver"],
            ..Config::default()
        },
    }
}
