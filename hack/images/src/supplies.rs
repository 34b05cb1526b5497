//! Programs that the caller has built and that recipes refer to by name.

use std::collections::BTreeMap;
use std::fs;
use std::path::PathBuf;
use std::str::FromStr;

use anyhow::Context;

/// One program, as the command line names it.
#[derive(Debug, Clone)]
pub(crate) struct Supply {
    name: String,
    file: PathBuf,
}

impl FromStr for Supply {
    type Err = &'static str;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        match text.split_once('=') {
            Some((name, file)) if !name.is_empty() && !file.is_empty() => Ok(Self {
                name: name.to_owned(),
                file: file.into(),
            }),
            _ => Err("not of the form NAME=FILE"),
        }
    }
}

/// The programs, read.
#[derive(Debug, Default)]
pub(crate) struct Supplies {
    contents: BTreeMap<String, Vec<u8>>,
}

impl Supplies {
    /// Reads all of them.
    pub(crate) fn read(supplies: &[Supply]) -> anyhow::Result<Self> {
        let contents = supplies.iter().map(|supply| {
            let content = fs::read(&supply.file)
                .with_context(|| format!("--supply: cannot read {}", supply.file.display()))?;
            Ok((supply.name.clone(), content))
        });
        Ok(Self {
            contents: contents.collect::<anyhow::Result<_>>()?,
        })
    }

    /// The program of this name.
    pub(crate) fn get(&self, name: &str) -> anyhow::Result<&[u8]> {
        self.contents
            .get(name)
            .map(Vec::as_slice)
            .with_context(|| format!("this image needs --supply {name}=FILE"))
    }
}
