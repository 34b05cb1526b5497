//! Image references as users write them, made explicit the way Docker, containerd
//! and the kubelet agree on: default registry, `library/`, tag `latest`.

use oci_spec::distribution::Reference;

use super::error::ImageError;

/// A parsed reference. A tag beside a digest is ignored, as containerd does.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(super) struct Name {
    registry: String,
    repository: String,
    selector: Selector,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(super) enum Selector {
    Tag(String),
    Digest(String),
}

impl Name {
    pub(super) fn parse(text: &str) -> Result<Self, ImageError> {
        let parsed =
            Reference::try_from(text).map_err(|error| ImageError::invalid_name(text, &error))?;
        let selector = match (parsed.digest(), parsed.tag()) {
            (Some(digest), _) if digest.starts_with("sha256:") => {
                Selector::Digest(digest.to_ascii_lowercase())
            }
            (Some(_), _) => {
                return Err(ImageError::invalid_name(
                    text,
                    &"only sha256 digests are supported",
                ));
            }
            (None, Some(tag)) => Selector::Tag(tag.to_owned()),
            (None, None) => return Err(ImageError::invalid_name(text, &"neither tag nor digest")),
        };
        Ok(Self {
            registry: parsed.registry().to_owned(),
            repository: parsed.repository().to_owned(),
            selector,
        })
    }

    /// Registry host as in the reference.
    pub(super) fn registry(&self) -> &str {
        &self.registry
    }

    /// Path of the repository in its registry.
    pub(super) fn repository(&self) -> &str {
        &self.repository
    }

    /// What follows the repository.
    pub(super) fn selector(&self) -> &Selector {
        &self.selector
    }

    /// Registry and repository.
    pub(super) fn familiar(&self) -> String {
        format!("{}/{}", self.registry, self.repository)
    }

    /// The name of the image in containerd.
    pub(super) fn canonical(&self) -> String {
        match &self.selector {
            Selector::Tag(tag) => format!("{}:{tag}", self.familiar()),
            Selector::Digest(digest) => self.with_digest(digest),
        }
    }

    /// The same repository by digest.
    pub(super) fn with_digest(&self, digest: &str) -> String {
        format!("{}@{digest}", self.familiar())
    }
}

impl Selector {
    /// As in the registry's URLs.
    pub(super) fn as_str(&self) -> &str {
        match self {
            Self::Tag(text) | Self::Digest(text) => text,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const DIGEST: &str = "sha256:aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa";

    #[test]
    fn short_names_are_docker_hubs() {
        for (text, canonical) in [
            ("busybox", "docker.io/library/busybox:latest"),
            ("busybox:1.36", "docker.io/library/busybox:1.36"),
            ("team/app", "docker.io/team/app:latest"),
            (
                "index.docker.io/busybox",
                "docker.io/library/busybox:latest",
            ),
            (
                "registry.sandman:5000/python",
                "registry.sandman:5000/python:latest",
            ),
            ("localhost/a/b:c", "localhost/a/b:c"),
        ] {
            assert_eq!(Name::parse(text).unwrap().canonical(), canonical, "{text}");
        }
    }

    #[test]
    fn a_digest_wins_over_a_tag() {
        let name = Name::parse(&format!("busybox:1@{DIGEST}")).unwrap();
        assert_eq!(
            name.canonical(),
            format!("docker.io/library/busybox@{DIGEST}")
        );
        assert_eq!(name.selector().as_str(), DIGEST);
    }

    #[test]
    fn refuses_what_is_no_reference() {
        for text in [
            "",
            "UPPER",
            "a b",
            "../x",
            "reg/../x",
            "busybox:",
            "busybox@sha256:12",
            "-x",
        ] {
            let error = Name::parse(text).unwrap_err();
            assert_eq!(error.reason(), "InvalidImageName", "{text}");
        }
    }
}
