//! Two image registries over one store: an open one, and one that wants a password, for tests of
//! pull secrets.

use std::path::Path;

use super::{Component, Plan, Probe};
use crate::net::{Member, endpoint};

/// Port of the open registry.
pub(crate) const REGISTRY_PORT: u16 = 5000;
/// Port of the registry with a password.
pub(crate) const PRIVATE_PORT: u16 = 5001;
/// Who may pull from the registry with a password. No secret: it guards copies of public images
/// inside a namespace of the developer's machine.
pub(crate) const USER: &str = "sandman";
/// Password of [`USER`].
pub(crate) const PASSWORD: &str = "sandman";
/// Both in the form that the registry reads (bcrypt).
const HTPASSWD: &str = "sandman:$2b$10$UJmI3wjZlkdlj3VuWjRqQe5tl.R5h6OKNS1Xr7phWRaj9GJUFJKCm\n";

impl Plan<'_> {
    pub(super) fn registries(&self) -> [Component; 2] {
        let open = self.registry("registry", REGISTRY_PORT, None);
        let htpasswd = self.config("htpasswd");
        let mut private = self.registry("registry-private", PRIVATE_PORT, Some(&htpasswd));
        private.files.push((htpasswd, HTPASSWD.to_owned()));
        [open, private]
    }

    fn registry(&self, name: &str, port: u16, htpasswd: Option<&Path>) -> Component {
        let store = self.layout.cache_dir().join("registry");
        let address = endpoint(Member::Registry, port);
        let mut content = serde_json::json!({
            "version": 0.1,
            "log": {"level": "warn", "accesslog": {"disabled": true}},
            "storage": {"filesystem": {"rootdirectory": store}},
            "http": {"addr": address.to_string()},
        });
        if let Some(path) = htpasswd {
            content["auth"] = serde_json::json!({
                "htpasswd": {"realm": "sandman dev cluster", "path": path},
            });
        }
        // The registry reads YAML, of which JSON is a part.
        let config = self.config(&format!("{name}.yaml"));
        let argv = vec![
            "/usr/bin/docker-registry".to_owned(),
            "serve".to_owned(),
            config.display().to_string(),
        ];
        let mut component = Component::new(name, Some(Member::Registry), argv);
        component.files.push((config, format!("{content:#}\n")));
        component.dirs.push(store);
        component.ready = Probe::Tcp(address.into());
        component
    }
}
