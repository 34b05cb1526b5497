//! The images of the dev cluster, and the sets that images come in.

use clap::ValueEnum;

use crate::conformance;
use crate::recipe::{Commit, Config, Layer, Part, Recipe};

pub(crate) const PATH: &str = "PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";

/// Images that are built and pushed together.
#[derive(Debug, Clone, Copy, ValueEnum)]
pub(crate) enum Set {
    /// What users of the dev cluster and its tests bring.
    Dev,
    /// What Kubernetes' own tests run.
    Conformance,
}

impl Set {
    /// The set's images, the small ones first.
    pub(crate) fn recipes(self) -> Vec<Recipe> {
        match self {
            Self::Dev => vec![
                pause("sandman/pause", "1"),
                scratch_static(),
                busybox(),
                nonroot_entrypoint(),
                python_swe(),
            ],
            Self::Conformance => conformance::recipes(),
        }
    }
}

/// A small image with a shell.
fn busybox() -> Recipe {
    Recipe {
        name: "sandman/busybox",
        tag: "1",
        layers: vec![busybox_layer()],
        config: Config {
            env: &[PATH],
            cmd: &["sh"],
            ..Config::default()
        },
    }
}

pub(crate) fn busybox_layer() -> Layer {
    let mut parts = skeleton(
        "root:x:0:0:root:/root:/bin/sh\nnobody:x:65534:65534:nobody:/home:/bin/false\n",
        "root:x:0:\nnogroup:x:65534:\n",
    );
    parts.push(Part::Packages(&["busybox-static"]));
    parts.push(Part::Applets {
        busybox: "usr/bin/busybox",
    });
    Layer {
        created_by: "busybox-static with a link for each command",
        parts,
    }
}

/// A user, a working directory, an ENTRYPOINT and arguments of its own.
fn nonroot_entrypoint() -> Recipe {
    let app = Layer {
        created_by: "the user app and its entry point",
        parts: vec![
            Part::File {
                path: "etc/passwd",
                mode: 0o644,
                content: "root:x:0:0:root:/root:/bin/sh\napp:x:1000:1000:app:/app:/bin/sh\n",
            },
            Part::File {
                path: "etc/group",
                mode: 0o644,
                content: "root:x:0:\napp:x:1000:\n",
            },
            Part::Directory {
                path: "app",
                mode: 0o755,
                owner: 1000,
            },
            Part::Directory {
                path: "app/work",
                mode: 0o755,
                owner: 1000,
            },
            Part::File {
                path: "app/entrypoint",
                mode: 0o755,
                content: include_str!("../programs/entrypoint.sh"),
            },
        ],
    };
    Recipe {
        name: "sandman/nonroot-entrypoint",
        tag: "1",
        layers: vec![busybox_layer(), app],
        config: Config {
            user: "1000:1000",
            env: &[PATH, "GREETING=hello from the image"],
            entrypoint: &["/app/entrypoint"],
            cmd: &["default", "arguments"],
            working_dir: "/app/work",
        },
    }
}

/// A program and nothing else: no shell, no `/etc`, no directory to mount on.
fn scratch_static() -> Recipe {
    Recipe {
        name: "sandman/scratch-static",
        tag: "1",
        layers: vec![Layer {
            created_by: "a static program",
            parts: vec![Part::Program {
                path: "static",
                mode: 0o755,
                source: include_str!("../programs/static.rs"),
            }],
        }],
        config: Config {
            entrypoint: &["/static"],
            cmd: &["sleep"],
            ..Config::default()
        },
    }
}

/// Holds the namespaces of a pod on the kubelet that Sandman is compared with.
pub(crate) fn pause(name: &'static str, tag: &'static str) -> Recipe {
    Recipe {
        name,
        tag,
        layers: vec![Layer {
            created_by: "a static program",
            parts: vec![Part::Program {
                path: "pause",
                mode: 0o755,
                source: include_str!("../programs/pause.rs"),
            }],
        }],
        config: Config {
            user: "65535:65535",
            entrypoint: &["/pause"],
            ..Config::default()
        },
    }
}

/// Stands for the image of a software engineering task: a distribution, a
/// language, tools, and a repository with tests to work on.
fn python_swe() -> Recipe {
    let mut base = skeleton(
        "root:x:0:0:root:/root:/bin/bash\nnobody:x:65534:65534:nobody:/nonexistent:/usr/sbin/nologin\n",
        "root:x:0:\nnogroup:x:65534:\n",
    );
    base.push(Part::Packages(&[
        "base-files",
        "bash",
        "coreutils",
        "dash",
        "diffutils",
        "findutils",
        "grep",
        "gzip",
        "hostname",
        "libc-bin",
        "login",
        "mawk",
        "ncurses-base",
        "ncurses-bin",
        "patch",
        "procps",
        "sed",
        "tar",
        "util-linux",
        "xz-utils",
    ]));
    // What the packages' own scripts would set up.
    for (path, target) in [
        ("usr/bin/awk", "mawk"),
        ("usr/bin/which", "which.debianutils"),
    ] {
        base.push(Part::Symlink { path, target });
    }
    let layer = |created_by, parts| Layer { created_by, parts };
    Recipe {
        name: "sandman/python-swe",
        tag: "1",
        layers: vec![
            layer("Debian: libraries, coreutils, bash", base),
            layer(
                "Python 3",
                vec![
                    Part::Packages(&["python3", "python3-distutils", "python3-venv"]),
                    Part::Symlink {
                        path: "usr/bin/python",
                        target: "python3",
                    },
                ],
            ),
            layer("git", vec![Part::Packages(&["git", "less"])]),
            layer(
                "pytest",
                vec![Part::Packages(&["python3-pytest", "python3-setuptools"])],
            ),
            layer(
                "the repository to work on",
                vec![Part::Repository {
                    path: "testbed",
                    commits: TESTBED,
                }],
            ),
        ],
        config: Config {
            env: &[PATH, "LANG=C.UTF-8", "HOME=/root"],
            cmd: &["python3"],
            working_dir: "/testbed",
            ..Config::default()
        },
    }
}

/// The directories every distribution has, in the merged layout to which
/// [`crate::debian`] maps all packages, and the users.
pub(crate) fn skeleton(passwd: &'static str, group: &'static str) -> Vec<Part> {
    let directory = |path, mode| Part::Directory {
        path,
        mode,
        owner: 0,
    };
    let mut parts: Vec<Part> = [
        ("dev", 0o755),
        ("etc", 0o755),
        ("home", 0o755),
        ("proc", 0o555),
        ("root", 0o700),
        ("run", 0o755),
        ("sys", 0o555),
        ("tmp", 0o1777),
        ("usr", 0o755),
        ("usr/bin", 0o755),
        ("usr/lib", 0o755),
        ("usr/lib64", 0o755),
        ("usr/sbin", 0o755),
        ("var", 0o755),
        ("var/tmp", 0o1777),
    ]
    .map(|(path, mode)| directory(path, mode))
    .into();
    for (path, target) in [
        ("bin", "usr/bin"),
        ("lib", "usr/lib"),
        ("lib64", "usr/lib64"),
        ("sbin", "usr/sbin"),
    ] {
        parts.push(Part::Symlink { path, target });
    }
    parts.push(Part::File {
        path: "etc/passwd",
        mode: 0o644,
        content: passwd,
    });
    parts.push(Part::File {
        path: "etc/group",
        mode: 0o644,
        content: group,
    });
    parts
}

/// A small library with its tests, in two commits.
const TESTBED: &[Commit] = &[
    Commit {
        subject: "Add sets of integer intervals",
        files: &[
            (".gitignore", "__pycache__/\n.pytest_cache/\n"),
            ("README.md", include_str!("../testbed/README.md")),
            ("pyproject.toml", include_str!("../testbed/pyproject.toml")),
            (
                "intervals/__init__.py",
                include_str!("../testbed/intervals/__init__.py"),
            ),
            (
                "intervals/interval.py",
                include_str!("../testbed/intervals/interval.py"),
            ),
            (
                "intervals/interval_set.py",
                include_str!("../testbed/intervals/interval_set.py"),
            ),
            (
                "tests/test_interval.py",
                include_str!("../testbed/tests/test_interval.py"),
            ),
            (
                "tests/test_interval_set.py",
                include_str!("../testbed/tests/test_interval_set.py"),
            ),
        ],
    },
    Commit {
        subject: "Read interval sets from text",
        files: &[
            (
                "intervals/text.py",
                include_str!("../testbed/intervals/text.py"),
            ),
            (
                "tests/test_text.py",
                include_str!("../testbed/tests/test_text.py"),
            ),
        ],
    },
];
