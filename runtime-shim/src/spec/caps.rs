//! Capabilities of a container: the runtime's default set, less `drop`, plus `add`.

use oci_spec::runtime::{Capabilities, Capability, LinuxCapabilities, LinuxCapabilitiesBuilder};

use super::SpecError;

/// What containers of every common runtime start with.
const DEFAULT: [Capability; 14] = [
    Capability::AuditWrite,
    Capability::Chown,
    Capability::DacOverride,
    Capability::Fowner,
    Capability::Fsetid,
    Capability::Kill,
    Capability::Mknod,
    Capability::NetBindService,
    Capability::NetRaw,
    Capability::Setfcap,
    Capability::Setgid,
    Capability::Setpcap,
    Capability::Setuid,
    Capability::SysChroot,
];

const ALL: &str = "ALL";

/// Resolves `add` and `drop` as the CRI does: ALL first, then single names.
///
/// `available` bounds what ALL means: a host may itself lack capabilities, and a container
/// cannot be given those.
///
/// # Errors
/// [`SpecError::Config`] names an unknown capability.
pub fn resolve(
    add: &[String],
    drop: &[String],
    available: &Capabilities,
) -> Result<Capabilities, SpecError> {
    let is_all = |name: &String| name.eq_ignore_ascii_case(ALL);
    let mut set: Capabilities = DEFAULT.into();
    if add.iter().any(is_all) {
        set.clone_from(available);
    }
    if drop.iter().any(is_all) {
        set.clear();
    }
    for name in add.iter().filter(|name| !is_all(name)) {
        set.insert(parse(name)?);
    }
    for name in drop.iter().filter(|name| !is_all(name)) {
        set.remove(&parse(name)?);
    }
    Ok(set)
}

fn parse(name: &str) -> Result<Capability, SpecError> {
    let upper = name.to_ascii_uppercase();
    let bare = upper.strip_prefix("CAP_").unwrap_or(&upper);
    bare.parse()
        .map_err(|_| SpecError::config(format!("securityContext.capabilities: unknown {name:?}")))
}

/// The five sets of a process that holds `set`.
///
/// Inheritable and ambient stay empty: with them, a program run by another user inside would
/// gain capabilities that the image's author never gave it (CVE-2022-24769).
///
/// # Errors
/// None in practice.
pub fn sets(set: &Capabilities) -> Result<LinuxCapabilities, SpecError> {
    let mut sets = LinuxCapabilitiesBuilder::default()
        .bounding(set.clone())
        .effective(set.clone())
        .permitted(set.clone())
        .build()?;
    sets.set_inheritable(None).set_ambient(None);
    Ok(sets)
}

/// Capabilities numbered by the kernel, as the bits of `CapBnd` in `/proc/<pid>/status`.
const BY_NUMBER: [Capability; 41] = [
    Capability::Chown,
    Capability::DacOverride,
    Capability::DacReadSearch,
    Capability::Fowner,
    Capability::Fsetid,
    Capability::Kill,
    Capability::Setgid,
    Capability::Setuid,
    Capability::Setpcap,
    Capability::LinuxImmutable,
    Capability::NetBindService,
    Capability::NetBroadcast,
    Capability::NetAdmin,
    Capability::NetRaw,
    Capability::IpcLock,
    Capability::IpcOwner,
    Capability::SysModule,
    Capability::SysRawio,
    Capability::SysChroot,
    Capability::SysPtrace,
    Capability::SysPacct,
    Capability::SysAdmin,
    Capability::SysBoot,
    Capability::SysNice,
    Capability::SysResource,
    Capability::SysTime,
    Capability::SysTtyConfig,
    Capability::Mknod,
    Capability::Lease,
    Capability::AuditWrite,
    Capability::AuditControl,
    Capability::Setfcap,
    Capability::MacOverride,
    Capability::MacAdmin,
    Capability::Syslog,
    Capability::WakeAlarm,
    Capability::BlockSuspend,
    Capability::AuditRead,
    Capability::Perfmon,
    Capability::Bpf,
    Capability::CheckpointRestore,
];

/// Reads a bit set as `/proc/<pid>/status` prints it.
#[must_use]
pub fn from_bits(bits: u64) -> Capabilities {
    BY_NUMBER
        .iter()
        .enumerate()
        .filter(|(number, _)| bits & (1 << number) != 0)
        .map(|(_, capability)| *capability)
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn list(names: &[&str]) -> Vec<String> {
        names.iter().map(ToString::to_string).collect()
    }

    #[test]
    fn add_and_drop_combine() {
        let host = from_bits(u64::MAX);
        let set = |add: &[&str], drop: &[&str]| resolve(&list(add), &list(drop), &host).unwrap();
        assert_eq!(set(&[], &[]), DEFAULT.into());
        assert_eq!(set(&["NET_ADMIN"], &["ALL"]), [Capability::NetAdmin].into());
        assert_eq!(set(&["ALL"], &[]), host);
        assert!(!set(&["ALL"], &["SYS_ADMIN"]).contains(&Capability::SysAdmin));
        assert!(!set(&[], &["cap_net_raw"]).contains(&Capability::NetRaw));
    }

    #[test]
    fn unknown_names_are_refused() {
        let error = resolve(&list(&["FLY"]), &[], &Capabilities::new()).unwrap_err();
        assert!(error.to_string().contains("FLY"));
    }

    #[test]
    fn bits_follow_the_kernel() {
        assert_eq!(from_bits(1 << 24), [Capability::SysResource].into());
        assert_eq!(from_bits(0), Capabilities::new());
    }
}
