//! Durable records of sandboxes, on the volatile file system of `state_dir`: they outlive this
//! process, and a reboot ends what they describe.
//!
//! A record holds neither the contents of volumes nor registry credentials. It does hold
//! environment variables, which may be secret, so nobody but the owner may read it.

use std::collections::BTreeMap;
use std::fs::{self, File, OpenOptions, Permissions};
use std::io::{self, Write};
use std::os::unix::fs::{OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};

use prost::Message;
use sandman_protocol::v1;
use tracing::warn;

use super::facts::Facts;

const SPEC: &str = "spec";
const FACTS: &str = "facts";

/// A sandbox as it is written down.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Record {
    /// What is wanted, without contents and credentials.
    pub spec: v1::SandboxSpec,
    /// What has happened.
    pub facts: Facts,
}

/// The records of this host.
#[derive(Clone, Debug)]
pub struct Store {
    dir: PathBuf,
    term: PathBuf,
}

impl Store {
    /// Uses `state_dir/sandboxes`, which it makes.
    ///
    /// # Errors
    /// The folder cannot be made private.
    pub fn open(state_dir: &Path) -> io::Result<Self> {
        let dir = state_dir.join("sandboxes");
        fs::create_dir_all(&dir)?;
        fs::set_permissions(&dir, Permissions::from_mode(0o700))?;
        Ok(Self {
            dir,
            term: state_dir.join("term"),
        })
    }

    /// All records. One that cannot be read is left where it is and reported in the log: its
    /// containers are then found by their labels.
    ///
    /// # Errors
    /// The folder cannot be listed.
    pub fn load(&self) -> io::Result<BTreeMap<String, Record>> {
        let mut records = BTreeMap::new();
        for entry in fs::read_dir(&self.dir)? {
            let path = entry?.path();
            let Some(uid) = path.file_name().and_then(|name| name.to_str()) else {
                continue;
            };
            match read(&path) {
                Ok(record) => {
                    records.insert(uid.to_owned(), record);
                }
                Err(error) => warn!(pod_uid = uid, %error, "cannot read the record of a sandbox"),
            }
        }
        Ok(records)
    }

    /// Writes what is wanted of a sandbox.
    ///
    /// # Errors
    /// The file system's.
    pub fn write_spec(&self, spec: &v1::SandboxSpec) -> io::Result<()> {
        self.write(&spec.uid, SPEC, &without_secrets(spec).encode_to_vec())
    }

    /// Writes what has happened to a sandbox.
    ///
    /// # Errors
    /// The file system's.
    pub fn write_facts(&self, uid: &str, facts: &Facts) -> io::Result<()> {
        self.write(uid, FACTS, &serde_json::to_vec(facts)?)
    }

    /// Forgets a sandbox. A missing record is no error.
    ///
    /// # Errors
    /// The file system's.
    pub fn remove(&self, uid: &str) -> io::Result<()> {
        match fs::remove_dir_all(self.dir.join(uid)) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
            _ => Ok(()),
        }
    }

    /// The highest leader term obeyed so far.
    ///
    /// # Errors
    /// The file exists but cannot be read: obeying anybody then would be wrong.
    pub fn term(&self) -> io::Result<u64> {
        match fs::read_to_string(&self.term) {
            Ok(text) => text.trim().parse().map_err(io::Error::other),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(0),
            Err(error) => Err(error),
        }
    }

    /// Remembers a leader term.
    ///
    /// # Errors
    /// The file system's.
    pub fn write_term(&self, term: u64) -> io::Result<()> {
        replace(&self.term, term.to_string().as_bytes())
    }

    fn write(&self, uid: &str, name: &str, bytes: &[u8]) -> io::Result<()> {
        let dir = self.dir.join(uid);
        fs::create_dir_all(&dir)?;
        replace(&dir.join(name), bytes)
    }
}

/// Replaces a file in one step; readers see the old or the new contents, whenever we die.
fn replace(path: &Path, bytes: &[u8]) -> io::Result<()> {
    let fresh = path.with_extension("new");
    let mut file: File = OpenOptions::new()
        .write(true)
        .create(true)
        .truncate(true)
        .mode(0o600)
        .open(&fresh)?;
    file.write_all(bytes)?;
    fs::rename(&fresh, path)
}

fn read(dir: &Path) -> io::Result<Record> {
    let spec = fs::read(dir.join(SPEC))?;
    let spec = v1::SandboxSpec::decode(spec.as_slice()).map_err(io::Error::other)?;
    let facts = match fs::read(dir.join(FACTS)) {
        Ok(bytes) => serde_json::from_slice(&bytes)?,
        Err(error) if error.kind() == io::ErrorKind::NotFound => Facts::default(),
        Err(error) => return Err(error),
    };
    Ok(Record { spec, facts })
}

fn without_secrets(spec: &v1::SandboxSpec) -> v1::SandboxSpec {
    let mut spec = spec.clone();
    spec.registry_credentials.clear();
    for volume in &mut spec.volumes {
        if let Some(v1::volume::Source::Files(files)) = &mut volume.source {
            files.files.clear();
        }
    }
    spec
}

#[cfg(test)]
mod tests {
    use super::*;

    fn spec() -> v1::SandboxSpec {
        let files = v1::Files {
            files: vec![v1::File {
                path: "token".into(),
                ..Default::default()
            }],
            secret: true,
        };
        v1::SandboxSpec {
            uid: "u".into(),
            volumes: vec![v1::Volume {
                name: "v".into(),
                source: Some(v1::volume::Source::Files(files)),
            }],
            registry_credentials: vec![v1::RegistryCredential {
                password: "p".into(),
                ..Default::default()
            }],
            ..Default::default()
        }
    }

    #[test]
    fn records_come_back_without_secrets() {
        let dir = tempfile::tempdir().unwrap();
        let store = Store::open(dir.path()).unwrap();
        store.write_spec(&spec()).unwrap();
        let facts = Facts {
            removed: true,
            ..Default::default()
        };
        store.write_facts("u", &facts).unwrap();

        let records = Store::open(dir.path()).unwrap().load().unwrap();
        let record = &records["u"];
        assert_eq!(record.facts, facts);
        assert!(record.spec.registry_credentials.is_empty());
        let Some(v1::volume::Source::Files(files)) = &record.spec.volumes[0].source else {
            panic!("lost the volume")
        };
        assert!(files.secret && files.files.is_empty());

        store.remove("u").unwrap();
        store.remove("u").unwrap();
        assert!(store.load().unwrap().is_empty());
    }

    #[test]
    fn nobody_else_reads_records_and_damage_is_survived() {
        let dir = tempfile::tempdir().unwrap();
        let store = Store::open(dir.path()).unwrap();
        store.write_spec(&spec()).unwrap();
        let file = dir.path().join("sandboxes/u/spec");
        assert_eq!(
            fs::metadata(&file).unwrap().permissions().mode() & 0o777,
            0o600
        );
        fs::write(&file, [0xff]).unwrap();
        assert!(store.load().unwrap().is_empty());
    }

    #[test]
    fn terms_are_remembered() {
        let dir = tempfile::tempdir().unwrap();
        let store = Store::open(dir.path()).unwrap();
        assert_eq!(store.term().unwrap(), 0);
        store.write_term(7).unwrap();
        assert_eq!(Store::open(dir.path()).unwrap().term().unwrap(), 7);
        fs::write(dir.path().join("term"), "x").unwrap();
        assert!(store.term().is_err());
    }
}
