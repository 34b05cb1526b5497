//! Capabilities by name and number.

use oci_spec::runtime::{Capability, LinuxCapabilities};

use crate::zygote::plan::Capabilities;

/// In the kernel's order (linux/capability.h).
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

/// The bit of one capability.
#[must_use]
pub fn bit(capability: Capability) -> u64 {
    BY_NUMBER
        .iter()
        .position(|known| *known == capability)
        .map_or(0, |number| 1 << number)
}

/// The sets of a process; without a word about them, all are empty.
#[must_use]
pub fn sets(spec: Option<&LinuxCapabilities>) -> Capabilities {
    let Some(spec) = spec else {
        return Capabilities::default();
    };
    let bits = |set: &Option<oci_spec::runtime::Capabilities>| {
        set.iter()
            .flatten()
            .map(|capability| bit(*capability))
            .sum()
    };
    Capabilities {
        bounding: bits(spec.bounding()),
        effective: bits(spec.effective()),
        permitted: bits(spec.permitted()),
        inheritable: bits(spec.inheritable()),
        ambient: bits(spec.ambient()),
    }
}

#[cfg(test)]
mod tests {
    use oci_spec::runtime::LinuxCapabilitiesBuilder;

    use super::*;

    #[test]
    fn numbers_follow_the_kernel() {
        assert_eq!(bit(Capability::Chown), 1);
        assert_eq!(bit(Capability::SysAdmin), 1 << 21);
        assert_eq!(bit(Capability::Mknod), 1 << 27);
        assert_eq!(bit(Capability::CheckpointRestore), 1 << 40);
    }

    #[test]
    fn absent_sets_are_empty() {
        assert_eq!(sets(None), Capabilities::default());
        let mut spec = LinuxCapabilitiesBuilder::default()
            .bounding([Capability::Kill, Capability::Chown])
            .build()
            .unwrap();
        spec.set_effective(None)
            .set_permitted(None)
            .set_inheritable(None)
            .set_ambient(None);
        let expected = Capabilities {
            bounding: 0b10_0001,
            ..Capabilities::default()
        };
        assert_eq!(sets(Some(&spec)), expected);
    }
}
