//! Files of configMap, secret, downwardAPI and projected volumes
//! (`pkg/volume/{configmap,secret,downwardapi,projected}`).

use k8s_openapi::ByteString;
use k8s_openapi::api::core::v1::{DownwardAPIVolumeFile, KeyToPath, Pod, Volume};
use sandman_protocol::v1;
use sandman_protocol::v1::file::Content;
use sandman_protocol::v1::volume::Source;
use std::collections::BTreeMap;

use super::fields::{self, Field};
use super::tokens::TokenKey;
use super::{Problem, Sources, containers};
use crate::pods::spec::pull_policy;
use crate::quantity;

/// What the API server fills in where the author says nothing.
const DEFAULT_MODE: i32 = 0o644;

/// The volume with its files.
pub(super) fn fill(pod: &Pod, volume: &Volume, sources: &Sources) -> Result<v1::Volume, Problem> {
    let source = if let Some(empty_dir) = &volume.empty_dir {
        Source::EmptyDir(v1::EmptyDir {
            memory: empty_dir.medium.as_deref() == Some("Memory"),
            size_limit_bytes: empty_dir
                .size_limit
                .as_ref()
                .and_then(quantity::units)
                .unwrap_or(0),
        })
    } else if let Some(image) = &volume.image {
        Source::Image(v1::ImageVolume {
            reference: image.reference.clone().unwrap_or_default(),
            pull_policy: pull_policy(image.pull_policy.as_deref()).into(),
        })
    } else if let Some(host_path) = &volume.host_path {
        Source::HostPath(v1::HostPath {
            path: host_path.path.clone(),
            r#type: host_path_type(host_path.type_.as_deref().unwrap_or_default()).into(),
        })
    } else {
        Source::Files(files(pod, volume, sources)?)
    };
    Ok(v1::Volume {
        name: volume.name.clone(),
        source: Some(source),
    })
}

fn host_path_type(name: &str) -> v1::HostPathType {
    use v1::HostPathType as Type;
    match name {
        "DirectoryOrCreate" => Type::DirectoryOrCreate,
        "Directory" => Type::Directory,
        "FileOrCreate" => Type::FileOrCreate,
        "File" => Type::File,
        "Socket" => Type::Socket,
        "CharDevice" => Type::CharDevice,
        "BlockDevice" => Type::BlockDevice,
        _ => Type::Unspecified,
    }
}

fn files(pod: &Pod, volume: &Volume, sources: &Sources) -> Result<v1::Files, Problem> {
    let mut files = FileSet::default();
    if let Some(source) = &volume.config_map {
        let mode = source.default_mode.unwrap_or(DEFAULT_MODE);
        let optional = source.optional == Some(true);
        files.config_map(
            sources,
            &source.name,
            source.items.as_deref(),
            mode,
            optional,
        )?;
    }
    if let Some(source) = &volume.secret {
        let mode = source.default_mode.unwrap_or(DEFAULT_MODE);
        let optional = source.optional == Some(true);
        let name = source.secret_name.as_deref().unwrap_or_default();
        files.secret(sources, name, source.items.as_deref(), mode, optional)?;
    }
    if let Some(source) = &volume.downward_api {
        let mode = source.default_mode.unwrap_or(DEFAULT_MODE);
        files.downward_api(pod, sources, source.items.as_deref(), mode)?;
    }
    if let Some(projected) = &volume.projected {
        let mode = projected.default_mode.unwrap_or(DEFAULT_MODE);
        for source in projected.sources.iter().flatten() {
            if let Some(source) = &source.config_map {
                let optional = source.optional == Some(true);
                files.config_map(
                    sources,
                    &source.name,
                    source.items.as_deref(),
                    mode,
                    optional,
                )?;
            }
            if let Some(source) = &source.secret {
                let optional = source.optional == Some(true);
                files.secret(
                    sources,
                    &source.name,
                    source.items.as_deref(),
                    mode,
                    optional,
                )?;
            }
            if let Some(source) = &source.downward_api {
                files.downward_api(pod, sources, source.items.as_deref(), mode)?;
            }
            if let Some(source) = &source.service_account_token {
                let key = TokenKey::of(source);
                let token = sources.tokens.get(&key);
                let token = token
                    .ok_or_else(|| Problem::Pending("the service account token".to_owned()))?;
                // The kubelet makes this 0600 and hands the file to the container's
                // user. Files have no owner here, so any user of the pod reads it.
                files.secret = true;
                files.add(&source.path, mode, Content::Data(token.as_bytes().to_vec()))?;
            }
        }
    }
    Ok(v1::Files {
        files: files.files.into_values().collect(),
        secret: files.secret,
    })
}

/// Files by path; a later source replaces an earlier one's file.
#[derive(Default)]
struct FileSet {
    files: BTreeMap<String, v1::File>,
    secret: bool,
}

impl FileSet {
    fn config_map(
        &mut self,
        sources: &Sources,
        name: &str,
        items: Option<&[KeyToPath]>,
        mode: i32,
        optional: bool,
    ) -> Result<(), Problem> {
        let Some(config_map) = sources.config_map(name, optional)? else {
            return Ok(());
        };
        let text = config_map
            .data
            .iter()
            .flatten()
            .map(|(key, text)| (key, text.as_bytes()));
        let binary = config_map
            .binary_data
            .iter()
            .flatten()
            .map(|(key, data)| (key, &*data.0));
        let data: BTreeMap<&str, &[u8]> = text
            .chain(binary)
            .map(|(key, data)| (key.as_str(), data))
            .collect();
        self.payload("configmap", &data, items, mode, optional)
    }

    fn secret(
        &mut self,
        sources: &Sources,
        name: &str,
        items: Option<&[KeyToPath]>,
        mode: i32,
        optional: bool,
    ) -> Result<(), Problem> {
        self.secret = true;
        let Some(secret) = sources.secret(name, optional)? else {
            return Ok(());
        };
        let data = secret.data.iter().flatten();
        let data: BTreeMap<&str, &[u8]> = data
            .map(|(key, ByteString(data))| (key.as_str(), data.as_slice()))
            .collect();
        self.payload("secret", &data, items, mode, optional)
    }

    /// All keys, or those that `items` name.
    fn payload(
        &mut self,
        kind: &str,
        data: &BTreeMap<&str, &[u8]>,
        items: Option<&[KeyToPath]>,
        mode: i32,
        optional: bool,
    ) -> Result<(), Problem> {
        let items = items.unwrap_or_default();
        if items.is_empty() {
            for (key, data) in data {
                self.add(key, mode, Content::Data(data.to_vec()))?;
            }
            return Ok(());
        }
        for item in items {
            match data.get(item.key.as_str()) {
                Some(data) => {
                    let mode = item.mode.unwrap_or(mode);
                    self.add(&item.path, mode, Content::Data(data.to_vec()))?;
                }
                None if optional => {}
                None => {
                    return Err(Problem::Wrong(format!(
                        "{kind} references non-existent {kind} key: {}",
                        item.key
                    )));
                }
            }
        }
        Ok(())
    }

    fn downward_api(
        &mut self,
        pod: &Pod,
        sources: &Sources,
        items: Option<&[DownwardAPIVolumeFile]>,
        mode: i32,
    ) -> Result<(), Problem> {
        for item in items.unwrap_or_default() {
            let content = if let Some(reference) = &item.field_ref {
                match fields::field(pod, &reference.field_path, &sources.host_ip)
                    .map_err(Problem::Wrong)?
                {
                    Field::Text(text) => Content::Data(text.into_bytes()),
                    Field::OnHost(field) => Content::HostField(field.into()),
                }
            } else if let Some(selector) = &item.resource_field_ref {
                let name = selector.container_name.as_deref().unwrap_or_default();
                let container = containers(pod).find(|c| c.name == name);
                let container = container
                    .ok_or_else(|| Problem::Wrong(format!("container {name} not found")))?;
                let value = fields::resource(container, selector, sources.allocatable);
                Content::Data(value.map_err(Problem::Wrong)?.into_bytes())
            } else {
                continue;
            };
            self.add(&item.path, item.mode.unwrap_or(mode), content)?;
        }
        Ok(())
    }

    fn add(&mut self, path: &str, mode: i32, content: Content) -> Result<(), Problem> {
        // The API server checks this too; a host must never see another path.
        let bad =
            path.starts_with('/') || path.split('/').any(|part| matches!(part, "" | "." | ".."));
        if bad {
            return Err(Problem::Wrong(format!(
                "{path:?} is not a path inside the volume"
            )));
        }
        let mode = u32::try_from(mode).unwrap_or(0) & 0o777;
        let file = v1::File {
            path: path.to_owned(),
            mode,
            content: Some(content),
        };
        self.files.insert(path.to_owned(), file);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pods::resolve::Found;
    use serde_json::{Value as Json, json};
    use std::sync::Arc;

    fn run(volume: Json) -> Result<v1::Files, Problem> {
        let mut volume = volume;
        volume["name"] = json!("v");
        let pod: Pod = serde_json::from_value(json!({
            "metadata": {"name": "p", "namespace": "ns", "uid": "u", "labels": {"a": "b"}},
            "spec": {"serviceAccountName": "sa", "containers": [{"name": "c"}], "volumes": [volume]},
        }))
        .unwrap();
        let mut sources = Sources::default();
        let config = json!({"data": {"a": "1", "b": "2"}, "binaryData": {"bin": "AAE="}});
        let config = serde_json::from_value(config).unwrap();
        sources
            .config_maps
            .insert("config".into(), Found::Present(Arc::new(config)));
        let secret = serde_json::from_value(json!({"data": {"key": "c2VjcmV0"}})).unwrap();
        sources
            .secrets
            .insert("secret".into(), Found::Present(Arc::new(secret)));
        sources.secrets.insert("gone".into(), Found::Absent);
        let volume = &pod.spec.as_ref().unwrap().volumes.as_ref().unwrap()[0];
        for source in volume
            .projected
            .iter()
            .flat_map(|p| p.sources.iter().flatten())
        {
            if let Some(token) = &source.service_account_token {
                sources.tokens.insert(TokenKey::of(token), "jwt".into());
            }
        }
        match fill(&pod, volume, &sources)?.source {
            Some(Source::Files(files)) => Ok(files),
            other => panic!("{other:?}"),
        }
    }

    fn listing(files: &v1::Files) -> Vec<(&str, u32, String)> {
        let content = |file: &v1::File| match &file.content {
            Some(Content::Data(data)) => String::from_utf8_lossy(data).into_owned(),
            Some(Content::HostField(field)) => format!("<{field}>"),
            None => String::new(),
        };
        files
            .files
            .iter()
            .map(|f| (f.path.as_str(), f.mode, content(f)))
            .collect()
    }

    #[test]
    fn all_keys_or_the_named_ones() {
        let files = run(json!({"configMap": {"name": "config", "defaultMode": 0o400}})).unwrap();
        let names: Vec<_> = files
            .files
            .iter()
            .map(|f| (f.path.as_str(), f.mode))
            .collect();
        assert_eq!(names, [("a", 0o400), ("b", 0o400), ("bin", 0o400)]);
        assert!(!files.secret);

        let items = json!([{"key": "b", "path": "dir/b", "mode": 0o755}]);
        let files = run(json!({"configMap": {"name": "config", "items": items}})).unwrap();
        assert_eq!(listing(&files), [("dir/b", 0o755, "2".to_owned())]);
    }

    #[test]
    fn missing_things_are_errors_unless_optional() {
        let message = |volume| match run(volume).unwrap_err() {
            Problem::Wrong(message) => message,
            Problem::Pending(what) => panic!("pending {what}"),
        };
        assert_eq!(
            message(json!({"secret": {"secretName": "gone"}})),
            "secret \"gone\" not found"
        );
        let items = json!([{"key": "no", "path": "no"}]);
        assert!(
            message(json!({"secret": {"secretName": "secret", "items": items}}))
                .contains("key: no")
        );
        let optional = json!({"secret": {"secretName": "gone", "optional": true}});
        assert_eq!(listing(&run(optional).unwrap()), []);
    }

    #[test]
    fn a_projected_volume_joins_its_sources() {
        let files = run(json!({"projected": {"defaultMode": 0o444, "sources": [
            {"serviceAccountToken": {"path": "token", "expirationSeconds": 3607}},
            {"configMap": {"name": "config", "items": [{"key": "a", "path": "ca.crt"}]}},
            {"downwardAPI": {"items": [
                {"path": "namespace", "fieldRef": {"fieldPath": "metadata.namespace"}},
                {"path": "ip", "fieldRef": {"fieldPath": "status.podIP"}},
            ]}},
        ]}}))
        .unwrap();
        assert!(files.secret);
        assert_eq!(
            listing(&files),
            [
                ("ca.crt", 0o444, "1".to_owned()),
                ("ip", 0o444, "<1>".to_owned()),
                ("namespace", 0o444, "ns".to_owned()),
                ("token", 0o444, "jwt".to_owned()),
            ]
        );
    }

    #[test]
    fn paths_stay_inside_the_volume() {
        for path in ["../x", "/x", "a/../../x", "", "a//b", "."] {
            let items = json!([{"key": "a", "path": path}]);
            assert!(
                run(json!({"configMap": {"name": "config", "items": items}})).is_err(),
                "{path}"
            );
        }
    }
}
