//! What was done to each file, for people (one line a file) and for programs (one JSON object a line).

use std::io::Write;
use std::path::{Path, PathBuf};

use serde::Serialize;
use time::format_description::well_known::Rfc3339;

use crate::certificate::Certificate;

/// What happened to a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Action {
    /// It was not there and is now.
    Created,
    /// It was re-issued.
    Renewed,
    /// It was found good and left alone.
    Kept,
}

/// One file and what happened to it.
#[derive(Clone, Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Report {
    /// What happened.
    pub action: Action,
    /// The file.
    pub path: PathBuf,
    /// Subject, of certificates.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub subject: Option<String>,
    /// Subject alternative names with their kind (`DNS:`, `IP:`, `URI:`), of certificates.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub names: Vec<String>,
    /// Serial number, of certificates.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub serial: Option<String>,
    /// End of validity (RFC 3339), of certificates.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub not_after: Option<String>,
}

impl Report {
    /// About a file that is not a certificate.
    pub(crate) fn file(action: Action, path: &Path) -> Self {
        Self {
            action,
            path: path.to_owned(),
            subject: None,
            names: Vec::new(),
            serial: None,
            not_after: None,
        }
    }

    /// About a certificate.
    pub(crate) fn certificate(action: Action, path: &Path, certificate: &Certificate) -> Self {
        Self {
            subject: Some(certificate.profile.subject()),
            names: certificate.profile.names(),
            serial: Some(certificate.serial.clone()),
            not_after: certificate.not_after.format(&Rfc3339).ok(),
            ..Self::file(action, path)
        }
    }

    /// Writes the line for people.
    pub fn write_text(&self, out: &mut impl Write) -> std::io::Result<()> {
        let action = match self.action {
            Action::Created => "created",
            Action::Renewed => "renewed",
            Action::Kept => "kept   ",
        };
        write!(out, "{action} {}", self.path.display())?;
        if let Some(subject) = &self.subject {
            write!(out, "  {subject}")?;
        }
        if !self.names.is_empty() {
            write!(out, "  [{}]", self.names.join(" "))?;
        }
        if let Some(not_after) = &self.not_after {
            write!(out, "  until {not_after}")?;
        }
        writeln!(out)
    }
}
