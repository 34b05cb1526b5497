//! Whole specs: what a plain pod gets, and how single wishes change it.

use oci_spec::image::{ConfigBuilder, ImageConfigurationBuilder};
use oci_spec::runtime::Capability;

use super::*;

fn host() -> HostLimits {
    HostLimits {
        allow_privileged: false,
        pids_limit: 100,
        cgroup_parent: "/sandman/host-0".into(),
        capabilities: caps::from_bits(u64::MAX),
        oom_floor: None,
        nofile: 20_000,
        memory_bytes: 1 << 30,
        cgroup_namespace: false,
    }
}

fn image() -> ImageConfiguration {
    let config = ConfigBuilder::default()
        .user("1000:1000")
        .working_dir("work")
        .entrypoint(vec!["/entry".to_owned()])
        .cmd(vec!["arg".to_owned()])
        .build()
        .unwrap();
    ImageConfigurationBuilder::default()
        .config(config)
        .build()
        .unwrap()
}

fn sandbox() -> v1::SandboxSpec {
    v1::SandboxSpec {
        uid: "u-1".into(),
        name: "pod".into(),
        namespace: "ns".into(),
        hostname: "pod".into(),
        ..Default::default()
    }
}

fn container() -> v1::Container {
    v1::Container {
        name: "c".into(),
        termination_message_path: "/dev/termination-log".into(),
        ..Default::default()
    }
}

fn build_with(
    host: &HostLimits,
    container: &v1::Container,
    volumes: &[Bind],
) -> Result<Spec, SpecError> {
    build_in(host, &sandbox(), container, volumes)
}

fn build_in(
    host: &HostLimits,
    sandbox: &v1::SandboxSpec,
    container: &v1::Container,
    volumes: &[Bind],
) -> Result<Spec, SpecError> {
    let etc = EtcPaths {
        hosts: "/h/hosts".into(),
        hostname: "/h/hostname".into(),
        resolv_conf: "/h/resolv.conf".into(),
    };
    let accounts = Accounts::default();
    let namespaces = [(
        LinuxNamespaceType::Network,
        PathBuf::from("/run/netns/u-1/net"),
    )];
    let prepared = Prepared {
        container_id: "u-1-c-0",
        accounts: &accounts,
        hostname: "pod",
        devices: vec![],
        namespaces: &namespaces,
        values: HostValues::default(),
        volumes,
        etc: &etc,
        shm: None,
        termination_file: Some(Path::new("/h/term")),
        agent: (!container.without_agent).then_some(Path::new("/h/daemon")),
        localhost_profile: None,
        users: None,
    };
    build(host, sandbox, container, &image(), &prepared)
}

#[test]
fn only_those_without_any_wish_share_their_memory_cgroup() {
    let shared = |spec: &Spec| {
        let annotations = spec.annotations().as_ref()?;
        annotations.get(MEMORY_ANNOTATION).cloned()
    };
    let plain = build_with(&host(), &container(), &[]).unwrap();
    assert_eq!(
        shared(&plain).as_deref(),
        Some("/sandman/host-0/besteffort")
    );
    let mut wishing = container();
    wishing.resources = Some(v1::ContainerResources {
        cpu_request_millis: 1,
        ..Default::default()
    });
    let mut pod = sandbox();
    pod.containers.push(wishing.clone());
    let spec = build_in(&host(), &pod, &wishing, &[]).unwrap();
    assert_eq!(shared(&spec), None);
}

#[test]
fn a_plain_container_is_confined_and_runs_below_the_agent() {
    let spec = build_with(&host(), &container(), &[]).unwrap();
    let process = spec.process().as_ref().unwrap();
    assert_eq!(
        process.args().as_ref().unwrap(),
        &[
            AGENT_PATH,
            "init",
            "--report",
            "/dev/termination-log",
            "--",
            "/entry",
            "arg"
        ]
    );
    assert_eq!((process.user().uid(), process.user().gid()), (1000, 1000));
    assert_eq!(process.cwd(), Path::new("/work"));
    assert_eq!(process.oom_score_adj(), Some(1000));
    let capabilities = process.capabilities().as_ref().unwrap();
    assert!(
        !capabilities
            .bounding()
            .as_ref()
            .unwrap()
            .contains(&Capability::SysAdmin)
    );
    assert!(capabilities.inheritable().is_none() && capabilities.ambient().is_none());

    let linux = spec.linux().as_ref().unwrap();
    assert_eq!(
        linux.cgroups_path().as_deref(),
        Some(Path::new("/sandman/host-0/besteffort/podu-1/u-1-c-0"))
    );
    assert!(linux.seccomp().is_some());
    assert!(
        linux
            .masked_paths()
            .as_ref()
            .unwrap()
            .iter()
            .any(|p| p == "/proc/kcore")
    );
    let paths: Vec<_> = linux
        .namespaces()
        .as_ref()
        .unwrap()
        .iter()
        .map(|n| (n.typ(), n.path().is_some()))
        .collect();
    assert_eq!(
        paths,
        [
            (LinuxNamespaceType::Pid, false),
            (LinuxNamespaceType::Mount, false),
            (LinuxNamespaceType::Network, true),
            (LinuxNamespaceType::Uts, false),
            (LinuxNamespaceType::Ipc, false),
        ]
    );
}

#[test]
fn an_image_may_be_its_own_pid_1() {
    let spec = build_with(
        &host(),
        &v1::Container {
            without_agent: true,
            ..container()
        },
        &[],
    );
    let spec = spec.unwrap();
    assert_eq!(
        spec.process().as_ref().unwrap().args().as_ref().unwrap(),
        &["/entry", "arg"]
    );
    let mounts = spec.mounts().as_ref().unwrap();
    assert!(
        mounts
            .iter()
            .all(|m| m.destination() != Path::new(AGENT_PATH))
    );
}

#[test]
fn privileged_needs_the_hosts_consent() {
    let security = v1::SecurityContext {
        privileged: true,
        ..Default::default()
    };
    let wish = v1::Container {
        security: Some(security),
        ..container()
    };
    assert!(
        build_with(&host(), &wish, &[])
            .unwrap_err()
            .to_string()
            .contains("privileged")
    );
    let spec = build_with(
        &HostLimits {
            allow_privileged: true,
            ..host()
        },
        &wish,
        &[],
    )
    .unwrap();
    let linux = spec.linux().as_ref().unwrap();
    assert!(linux.seccomp().is_none() && linux.masked_paths().is_none());
}

#[test]
fn seccomp_follows_the_wish() {
    let with = |kind: v1::seccomp::Kind| {
        let seccomp = v1::Seccomp {
            kind: kind as i32,
            profile: "p.json".into(),
        };
        let security = v1::SecurityContext {
            seccomp: Some(seccomp),
            ..Default::default()
        };
        build_with(
            &host(),
            &v1::Container {
                security: Some(security),
                ..container()
            },
            &[],
        )
    };
    let unconfined = with(v1::seccomp::Kind::Unconfined).unwrap();
    assert!(unconfined.linux().as_ref().unwrap().seccomp().is_none());
    let missing = with(v1::seccomp::Kind::Localhost).unwrap_err().to_string();
    assert!(missing.contains("p.json"), "{missing}");
}

#[test]
fn a_volume_over_the_termination_path_takes_it() {
    let volume = Bind {
        source: "/v".into(),
        destination: "/dev/termination-log".into(),
        ..Bind::default()
    };
    let spec = build_with(&host(), &container(), &[volume]).unwrap();
    let args = spec.process().as_ref().unwrap().args().clone().unwrap();
    assert!(!args.contains(&"--report".to_owned()), "{args:?}");
}

#[test]
fn oom_scores_below_the_floor_are_left_alone() {
    let spec = build_with(
        &HostLimits {
            oom_floor: Some(1001),
            ..host()
        },
        &container(),
        &[],
    );
    assert_eq!(
        spec.unwrap().process().as_ref().unwrap().oom_score_adj(),
        None
    );
}

#[test]
fn namespaces_of_the_host_are_not_made_anew() {
    let kinds = |sandbox: &v1::SandboxSpec| -> Vec<LinuxNamespaceType> {
        let spec = build_in(&host(), sandbox, &container(), &[]).unwrap();
        let linux = spec.linux().as_ref().unwrap();
        let namespaces = linux.namespaces().clone().unwrap();
        namespaces.iter().map(LinuxNamespace::typ).collect()
    };
    let plain = kinds(&sandbox());
    assert!(plain.contains(&LinuxNamespaceType::Pid) && plain.contains(&LinuxNamespaceType::Ipc));
    let shared = v1::SandboxSpec {
        host_pid: true,
        host_ipc: true,
        ..sandbox()
    };
    let shared = kinds(&shared);
    assert!(!shared.contains(&LinuxNamespaceType::Pid));
    assert!(!shared.contains(&LinuxNamespaceType::Ipc));
    assert!(shared.contains(&LinuxNamespaceType::Network));
}
