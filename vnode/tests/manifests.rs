//! The manifests of vnode are what this binary takes: its own configuration
//! check runs on the ConfigMap, with the Deployment's arguments.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::path::Path;
use std::process::Command;

use k8s_openapi::api::apps::v1::Deployment;
use k8s_openapi::api::core::v1::ConfigMap;

fn manifest<T: serde::de::DeserializeOwned>(name: &str) -> T {
    let path = Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("../manifests/vnode")
        .join(name);
    serde_yaml_ng::from_str(&std::fs::read_to_string(path).unwrap()).unwrap()
}

#[test]
fn the_deployment_starts_with_the_config_map() {
    let config: ConfigMap = manifest("configmap.yaml");
    let deployment: Deployment = manifest("deployment.yaml");
    let pod = deployment.spec.unwrap().template.spec.unwrap();
    let container = &pod.containers[0];
    let folder = tempfile::tempdir().unwrap();
    for (name, content) in config.data.unwrap() {
        std::fs::write(folder.path().join(name), content).unwrap();
    }
    let arguments = container.args.iter().flatten().map(|argument| {
        argument
            .replace("/etc/sandman/config", folder.path().to_str().unwrap())
            .replace("$(POD_IP)", "192.0.2.33")
    });
    let output = Command::new(env!("CARGO_BIN_EXE_sandman-vnode"))
        .args(arguments)
        .arg("--check")
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{said}");
}
