//! Who the process runs as: the pod's security context, else the image's USER.
//!
//! Pure over the text of `/etc/passwd` and `/etc/group`; reading them out of an untrusted image
//! is `rootfs`'s business. The rules are the CRI plugin's of containerd and the texts of
//! `runAsNonRoot` the kubelet's (kuberuntime/security_context_others.go).

use oci_spec::runtime::User;
use sandman_protocol::v1;

use super::SpecError;

/// Lines of an account file that are looked at, so that a hostile one costs little.
const MAX_LINES: usize = 100_000;

/// The image's account files; empty when the image has none.
#[derive(Clone, Debug, Default)]
pub struct Accounts {
    /// `/etc/passwd`
    pub passwd: String,
    /// `/etc/group`
    pub group: String,
}

struct Passwd<'a> {
    name: &'a str,
    uid: u32,
    gid: u32,
}

struct Group<'a> {
    name: &'a str,
    gid: u32,
    members: &'a str,
}

impl Accounts {
    fn users(&self) -> impl Iterator<Item = Passwd<'_>> {
        self.passwd.lines().take(MAX_LINES).filter_map(|line| {
            let mut fields = line.split(':');
            let name = fields.next()?;
            let uid = fields.nth(1)?.parse().ok()?;
            let gid = fields.next()?.parse().ok()?;
            Some(Passwd { name, uid, gid })
        })
    }

    fn groups(&self) -> impl Iterator<Item = Group<'_>> {
        self.group.lines().take(MAX_LINES).filter_map(|line| {
            let mut fields = line.split(':');
            let name = fields.next()?;
            let gid = fields.nth(1)?.parse().ok()?;
            Some(Group {
                name,
                gid,
                members: fields.next().unwrap_or_default(),
            })
        })
    }
}

/// What decides about the user besides the image.
#[derive(Clone, Copy, Debug)]
pub struct Wish<'a> {
    /// The container's security context.
    pub security: &'a v1::SecurityContext,
    /// Owner group of the pod's volumes.
    pub fs_group: Option<u32>,
    /// `name_namespace(uid)`, for messages.
    pub pod: &'a str,
    /// Container name, for messages.
    pub container: &'a str,
}

/// Resolves the process's user.
///
/// # Errors
/// [`SpecError::Config`] for an unknown name, or when `runAsNonRoot` is violated or cannot be
/// verified.
pub fn resolve(wish: &Wish<'_>, image_user: &str, accounts: &Accounts) -> Result<User, SpecError> {
    verify_non_root(wish, image_user)?;
    let security = wish.security;
    let (name_or_id, image_group) = match (security.run_as_user, image_user.split_once(':')) {
        (Some(uid), _) => (uid.to_string(), None),
        (None, Some((user, group))) => (user.to_owned(), Some(group)),
        (None, None) => (image_user.to_owned(), None),
    };
    let (uid, entry) = find_user(&name_or_id, accounts)?;
    let gid = match (security.run_as_group, image_group) {
        (Some(gid), _) => gid,
        (None, Some(group)) if !group.is_empty() => find_group(group, accounts)?,
        (None, _) => entry.as_ref().map_or(0, |entry| entry.gid),
    };

    // The primary group is listed too: without it, a file whose group is denied access could be
    // opened by giving the group up (CVE-2022-36109).
    let mut groups = vec![gid];
    if let Some(entry) = entry.as_ref().filter(|_| !security.strict_groups) {
        let named = accounts
            .groups()
            .filter(|g| g.members.split(',').any(|m| m == entry.name));
        groups.extend(named.map(|group| group.gid));
    }
    groups.extend(&security.supplemental_groups);
    groups.extend(wish.fs_group);
    let mut seen = std::collections::HashSet::new();
    groups.retain(|gid| seen.insert(*gid));

    let mut user = User::default();
    user.set_uid(uid)
        .set_gid(gid)
        .set_additional_gids(Some(groups));
    Ok(user)
}

fn find_user<'a>(
    name_or_id: &str,
    accounts: &'a Accounts,
) -> Result<(u32, Option<Passwd<'a>>), SpecError> {
    if name_or_id.is_empty() {
        return Ok((0, accounts.users().find(|user| user.uid == 0)));
    }
    if let Ok(uid) = name_or_id.parse::<u32>() {
        return Ok((uid, accounts.users().find(|user| user.uid == uid)));
    }
    let entry = accounts
        .users()
        .find(|user| user.name == name_or_id)
        .ok_or_else(|| {
            SpecError::config(format!(
                "unable to find user {name_or_id}: no matching entries in passwd file"
            ))
        })?;
    Ok((entry.uid, Some(entry)))
}

fn find_group(name_or_id: &str, accounts: &Accounts) -> Result<u32, SpecError> {
    if let Ok(gid) = name_or_id.parse() {
        return Ok(gid);
    }
    accounts
        .groups()
        .find(|group| group.name == name_or_id)
        .map(|group| group.gid)
        .ok_or_else(|| {
            SpecError::config(format!(
                "unable to find group {name_or_id}: no matching entries in group file"
            ))
        })
}

fn verify_non_root(wish: &Wish<'_>, image_user: &str) -> Result<(), SpecError> {
    if !wish.security.run_as_non_root {
        return Ok(());
    }
    let place = format!("(pod: {:?}, container: {})", wish.pod, wish.container);
    if let Some(uid) = wish.security.run_as_user {
        if uid == 0 {
            return Err(SpecError::config(format!(
                "container's runAsUser breaks non-root policy {place}"
            )));
        }
        return Ok(());
    }
    let name = image_user.split(':').next().unwrap_or_default();
    match name.parse::<u32>() {
        Ok(0) => {}
        Ok(_) => return Ok(()),
        Err(_) if name.is_empty() => {}
        Err(_) => {
            return Err(SpecError::config(format!(
                "container has runAsNonRoot and image has non-numeric user ({name}), \
                 cannot verify user is non-root {place}"
            )));
        }
    }
    Err(SpecError::config(format!(
        "container has runAsNonRoot and image will run as root {place}"
    )))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn accounts() -> Accounts {
        Accounts {
            passwd: "root:x:0:0::/root:/bin/sh\nbroken\napp:x:1000:1001::/:/bin/sh\n".into(),
            group: "root:x:0:\nwheel:x:10:root,app\nstaff:x:50:app\napp:x:1001:\n".into(),
        }
    }

    fn wish(security: &v1::SecurityContext) -> Wish<'_> {
        Wish {
            security,
            fs_group: Some(2000),
            pod: "p_ns(uid)",
            container: "c",
        }
    }

    fn ids(image_user: &str, security: &v1::SecurityContext) -> (u32, u32, Vec<u32>) {
        let user = resolve(&wish(security), image_user, &accounts()).unwrap();
        (
            user.uid(),
            user.gid(),
            user.additional_gids().clone().unwrap(),
        )
    }

    #[test]
    fn image_user_in_all_its_forms() {
        let none = v1::SecurityContext::default();
        assert_eq!(ids("", &none), (0, 0, vec![0, 10, 2000]));
        assert_eq!(ids("app", &none), (1000, 1001, vec![1001, 10, 50, 2000]));
        assert_eq!(ids("1000", &none), (1000, 1001, vec![1001, 10, 50, 2000]));
        assert_eq!(ids("app:staff", &none), (1000, 50, vec![50, 10, 2000]));
        assert_eq!(ids("4242:7", &none), (4242, 7, vec![7, 2000]));
        let strict = v1::SecurityContext {
            strict_groups: true,
            ..Default::default()
        };
        assert_eq!(ids("app", &strict), (1000, 1001, vec![1001, 2000]));
        for bad in ["nobody", "app:nobody", "-1"] {
            assert!(resolve(&wish(&none), bad, &accounts()).is_err(), "{bad}");
        }
    }

    #[test]
    fn the_pod_overrides_the_image() {
        let security = v1::SecurityContext {
            run_as_user: Some(4242),
            supplemental_groups: vec![7, 7],
            ..Default::default()
        };
        assert_eq!(ids("app:staff", &security), (4242, 0, vec![0, 7, 2000]));
        let security = v1::SecurityContext {
            run_as_group: Some(3),
            ..security
        };
        assert_eq!(ids("app", &security), (4242, 3, vec![3, 7, 2000]));
    }

    #[test]
    fn non_root_is_verified_in_the_kubelets_words() {
        let security = v1::SecurityContext {
            run_as_non_root: true,
            ..Default::default()
        };
        let text = |image_user: &str| {
            resolve(&wish(&security), image_user, &accounts())
                .unwrap_err()
                .to_string()
        };
        let place = r#"(pod: "p_ns(uid)", container: c)"#;
        assert_eq!(
            text(""),
            format!("container has runAsNonRoot and image will run as root {place}")
        );
        assert_eq!(text("0:5"), text(""));
        assert_eq!(
            text("app"),
            format!(
                "container has runAsNonRoot and image has non-numeric user (app), \
                 cannot verify user is non-root {place}"
            )
        );
        assert_eq!(ids("1000", &security).0, 1000);
        let root = v1::SecurityContext {
            run_as_user: Some(0),
            ..security
        };
        assert_eq!(
            resolve(&wish(&root), "1000", &accounts())
                .unwrap_err()
                .to_string(),
            format!("container's runAsUser breaks non-root policy {place}")
        );
    }
}
