//! Volumes and environment from configMaps, secrets, the pod itself and tokens.

use std::collections::BTreeMap;

use anyhow::{Result, ensure};
use k8s_openapi::ByteString;
use k8s_openapi::api::core::v1::{
    ConfigMap, ConfigMapVolumeSource, DownwardAPIVolumeFile, DownwardAPIVolumeSource,
    EmptyDirVolumeSource, EnvVar, EnvVarSource, Event, ImageVolumeSource, ObjectFieldSelector, Pod,
    Secret, SecretKeySelector, SecretVolumeSource, Volume, VolumeMount,
};
use kube::api::{ObjectMeta, Patch, PatchParams, PostParams};
use sandman_integration::{PodBuilder, Scope, is_phase, is_ready, wait_event, wait_pod};

async fn config_map(scope: &Scope, value: &str) -> Result<()> {
    let object = ConfigMap {
        metadata: ObjectMeta {
            name: Some("settings".to_owned()),
            ..Default::default()
        },
        data: Some(BTreeMap::from([("colour".to_owned(), value.to_owned())])),
        ..Default::default()
    };
    scope
        .api::<ConfigMap>()
        .create(&PostParams::default(), &object)
        .await?;
    Ok(())
}

async fn secret(scope: &Scope) -> Result<()> {
    let object = Secret {
        metadata: ObjectMeta {
            name: Some("keys".to_owned()),
            ..Default::default()
        },
        data: Some(BTreeMap::from([(
            "api".to_owned(),
            ByteString(b"s3cret".to_vec()),
        )])),
        ..Default::default()
    };
    scope
        .api::<Secret>()
        .create(&PostParams::default(), &object)
        .await?;
    Ok(())
}

fn mounted(builder: PodBuilder, name: &str, path: &str, volume: Volume) -> PodBuilder {
    builder
        .volume(Volume {
            name: name.to_owned(),
            ..volume
        })
        .spec(|spec| {
            for container in &mut spec.containers {
                container
                    .volume_mounts
                    .get_or_insert_default()
                    .push(VolumeMount {
                        name: name.to_owned(),
                        mount_path: path.to_owned(),
                        ..Default::default()
                    });
            }
        })
}

fn settings(optional: bool) -> Volume {
    Volume {
        config_map: Some(ConfigMapVolumeSource {
            name: "settings".to_owned(),
            optional: Some(optional),
            ..Default::default()
        }),
        ..Default::default()
    }
}

fn field(path: &str) -> ObjectFieldSelector {
    ObjectFieldSelector {
        field_path: path.to_owned(),
        ..Default::default()
    }
}

#[test]
fn every_kind_is_mounted() {
    Scope::run(|scope| async move {
        config_map(&scope, "blue").await?;
        secret(&scope).await?;
        let mut builder = PodBuilder::sleeper(&scope.cluster, "vols");
        builder = mounted(builder, "settings", "/settings", settings(false));
        builder = mounted(
            builder,
            "keys",
            "/keys",
            Volume {
                secret: Some(SecretVolumeSource {
                    secret_name: Some("keys".to_owned()),
                    default_mode: Some(0o400),
                    ..Default::default()
                }),
                ..Default::default()
            },
        );
        builder = mounted(
            builder,
            "info",
            "/info",
            Volume {
                downward_api: Some(DownwardAPIVolumeSource {
                    items: Some(vec![DownwardAPIVolumeFile {
                        path: "name".to_owned(),
                        field_ref: Some(field("metadata.name")),
                        ..Default::default()
                    }]),
                    ..Default::default()
                }),
                ..Default::default()
            },
        );
        builder = mounted(
            builder,
            "memory",
            "/memory",
            Volume {
                empty_dir: Some(EmptyDirVolumeSource {
                    medium: Some("Memory".to_owned()),
                    ..Default::default()
                }),
                ..Default::default()
            },
        );
        scope.ready_pod(&builder.build()).await?;
        let kubectl = scope.kubectl();
        for (command, want) in [
            ("cat /settings/colour", "blue"),
            ("cat /keys/api", "s3cret"),
            ("stat -Lc %a /keys/api", "400\n"),
            ("cat /info/name", "vols"),
            ("grep ' /memory ' /proc/mounts | cut -d' ' -f3", "tmpfs\n"),
            ("echo kept > /memory/file && cat /memory/file", "kept\n"),
            (
                "cat /var/run/secrets/kubernetes.io/serviceaccount/namespace",
                &scope.namespace,
            ),
            (
                "cut -c1-2 /var/run/secrets/kubernetes.io/serviceaccount/token",
                "ey\n",
            ),
            (
                "head -c 27 /var/run/secrets/kubernetes.io/serviceaccount/ca.crt",
                "-----BEGIN CERTIFICATE-----",
            ),
        ] {
            let got = kubectl
                .run(&["exec", "vols", "--", "sh", "-c", command])
                .await?
                .ok()?
                .text();
            ensure!(got == want, "{command}: {got:?}, want {want:?}");
        }
        Ok(())
    });
}

#[test]
fn a_changed_config_map_reaches_the_running_pod() {
    Scope::run(|scope| async move {
        config_map(&scope, "blue").await?;
        let builder = mounted(
            PodBuilder::sleeper(&scope.cluster, "live"),
            "s",
            "/settings",
            settings(false),
        );
        scope.ready_pod(&builder.build()).await?;
        let change = serde_json::json!({"data": {"colour": "green"}});
        scope
            .api::<ConfigMap>()
            .patch("settings", &PatchParams::default(), &Patch::Merge(&change))
            .await?;
        // The container itself waits; the exec's deadline bounds it.
        let script = "until [ \"$(cat /settings/colour)\" = green ]; do sleep 0.1; done";
        scope
            .kubectl()
            .run(&["exec", "live", "--", "sh", "-c", script])
            .await?
            .ok()?;
        Ok(())
    });
}

#[test]
fn environment_comes_from_everywhere() {
    Scope::run(|scope| async move {
        secret(&scope).await?;
        let from = |source: EnvVarSource, name: &str| EnvVar {
            name: name.to_owned(),
            value_from: Some(source),
            ..Default::default()
        };
        let plain = |name: &str, value: &str| EnvVar {
            name: name.to_owned(),
            value: Some(value.to_owned()),
            ..Default::default()
        };
        let pod = PodBuilder::sleeper(&scope.cluster, "env")
            .spec(|spec| {
                spec.containers[0].env = Some(vec![
                    plain("FIRST", "one"),
                    plain("SECOND", "$(FIRST)-two $$(FIRST) $(MISSING)"),
                    from(
                        EnvVarSource {
                            secret_key_ref: Some(SecretKeySelector {
                                name: "keys".to_owned(),
                                key: "api".to_owned(),
                                ..Default::default()
                            }),
                            ..Default::default()
                        },
                        "KEY",
                    ),
                    from(
                        EnvVarSource {
                            field_ref: Some(field("metadata.namespace")),
                            ..Default::default()
                        },
                        "WHERE",
                    ),
                    from(
                        EnvVarSource {
                            field_ref: Some(field("status.podIP")),
                            ..Default::default()
                        },
                        "IP",
                    ),
                ]);
            })
            .build();
        let pod = scope.ready_pod(&pod).await?;
        let ip = pod
            .status
            .and_then(|status| status.pod_ip)
            .unwrap_or_default();
        let text = scope
            .kubectl()
            .run(&["exec", "env", "--", "env"])
            .await?
            .ok()?
            .text();
        let variables: BTreeMap<&str, &str> = text
            .lines()
            .filter_map(|line| line.split_once('='))
            .collect();
        for (name, want) in [
            ("FIRST", "one"),
            ("SECOND", "one-two $(FIRST) $(MISSING)"),
            ("KEY", "s3cret"),
            ("WHERE", scope.namespace.as_str()),
            ("IP", ip.as_str()),
            ("KUBERNETES_SERVICE_HOST", "10.96.0.1"),
        ] {
            ensure!(
                variables.get(name) == Some(&want),
                "{name}: {:?}",
                variables.get(name)
            );
        }
        Ok(())
    });
}

#[test]
fn a_missing_config_map_holds_the_pod_until_it_appears() {
    Scope::run(|scope| async move {
        let builder = mounted(
            PodBuilder::sleeper(&scope.cluster, "waits"),
            "s",
            "/settings",
            settings(false),
        );
        scope.create_pod(&builder.build()).await?;
        wait_event(&scope.api::<Event>(), "waits", "FailedMount", "settings").await?;
        let pod = scope.api::<Pod>().get("waits").await?;
        ensure!(is_phase(&pod, "Pending"), "{:?}", pod.status);
        config_map(&scope, "blue").await?;
        wait_pod(&scope.api(), "waits", "ready", is_ready)
            .await
            .map(drop)
    });
}

#[test]
fn an_optional_config_map_may_be_missing() {
    Scope::run(|scope| async move {
        let builder = mounted(
            PodBuilder::sleeper(&scope.cluster, "free"),
            "s",
            "/settings",
            settings(true),
        );
        scope.ready_pod(&builder.build()).await.map(drop)
    });
}

#[test]
fn the_files_of_an_image_are_a_volume() {
    Scope::run(|scope| async move {
        let reference = sandman_integration::images::python(&scope.cluster);
        let image = Volume {
            image: Some(ImageVolumeSource {
                reference: Some(reference.clone()),
                pull_policy: Some("Always".to_owned()),
            }),
            ..Default::default()
        };
        let builder = PodBuilder::sleeper(&scope.cluster, "reader");
        let builder = mounted(builder, "files", "/files", image.clone()).spec(|spec| {
            let part = VolumeMount {
                name: "files".to_owned(),
                mount_path: "/part".to_owned(),
                sub_path: Some("etc".to_owned()),
                ..Default::default()
            };
            let mounts = &mut spec.containers[0].volume_mounts;
            mounts.get_or_insert_default().push(part);
        });
        scope.ready_pod(&builder.build()).await?;
        let text = format!("Successfully pulled image {reference:?}");
        wait_event(&scope.api::<Event>(), "reader", "Pulled", &text).await?;
        let kubectl = scope.kubectl();
        for (command, want) in [
            ("test -d /files/usr && echo there", "there"),
            ("test -e /part/passwd && echo there", "there"),
            ("touch /files/x 2> /dev/null || echo read-only", "read-only"),
            ("grep -c ' /files .*noexec' /proc/mounts", "1"),
        ] {
            let arguments = ["exec", "reader", "--", "sh", "-c", command];
            let text = kubectl.run(&arguments).await?.ok()?.text();
            ensure!(text.trim_end() == want, "{command}: {text:?}");
        }

        let missing = Volume {
            image: Some(ImageVolumeSource {
                reference: Some(format!("{reference}-missing")),
                ..Default::default()
            }),
            ..Default::default()
        };
        let builder = PodBuilder::sleeper(&scope.cluster, "waiter");
        let waiter = mounted(builder, "files", "/files", missing).build();
        scope.create_pod(&waiter).await?;
        let text = format!("Failed to pull image \"{reference}-missing\"");
        wait_event(&scope.api::<Event>(), "waiter", "Failed", &text).await?;
        wait_pod(
            &scope.api(),
            "waiter",
            "waiting for its image",
            |pod: &Pod| {
                let statuses = pod
                    .status
                    .as_ref()
                    .and_then(|s| s.container_statuses.as_ref());
                statuses.into_iter().flatten().any(|status| {
                    let waiting = status.state.as_ref().and_then(|s| s.waiting.as_ref());
                    waiting.is_some_and(|w| w.reason.as_deref() == Some("ErrImagePull"))
                })
            },
        )
        .await?;
        Ok(())
    });
}
