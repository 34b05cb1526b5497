//! OCI seccomp rules compiled to the kernel's filter programs.
//!
//! The meaning is libseccomp's, as containers know it from runc: names that an architecture does
//! not have are ignored there, several rules for a call are alternatives, two conditions on one
//! argument make two rules, and calls newer than every call of the profile give ENOSYS where the
//! profile refuses with EPERM, so that programs fall back to older calls (runc's seccomp/patchbpf).

use std::collections::BTreeMap;

use oci_spec::runtime::{
    Arch, LinuxSeccomp, LinuxSeccompAction, LinuxSeccompArg, LinuxSeccompFilterFlag,
    LinuxSeccompOperator, LinuxSyscall,
};

use crate::sys::privileges::Instruction;
use crate::zygote::plan::Seccomp;

/// Most instructions that the kernel takes (BPF_MAXINSNS).
const MAX_PROGRAM: usize = 4096;

// Classic BPF (linux/bpf_common.h): load a word, compare, return, combine.
const LOAD: u16 = 0x20;
const JUMP: u16 = 0x05;
const EQUAL: u16 = 0x15;
const GREATER: u16 = 0x25;
const AT_LEAST: u16 = 0x35;
const RETURN: u16 = 0x06;
const AND: u16 = 0x54;

// Offsets in `struct seccomp_data`.
const NUMBER: u32 = 0;
const ARCHITECTURE: u32 = 4;
const ARGUMENTS: u32 = 16;

const KILL_PROCESS: u32 = 0x8000_0000;
/// Bit that marks calls of the x32 ABI.
const X32: u32 = 0x4000_0000;

/// Why a profile is not compiled; the text names the field.
pub type Unsupported = String;

/// One ABI that the kernel tells apart.
#[derive(Clone, Copy, Debug)]
struct Abi {
    /// `AUDIT_ARCH_*`.
    audit: u32,
    number: fn(&str) -> Option<u32>,
    /// The same for calls with the x32 bit, where the architecture has them.
    has_x32: bool,
}

macro_rules! table {
    ($name:ident, $table:ident) => {
        fn $name(name: &str) -> Option<u32> {
            let number = name.parse::<syscalls::$table::Sysno>().ok()?;
            u32::try_from(number.id()).ok()
        }
    };
}

#[cfg(target_arch = "x86_64")]
mod native {
    use super::Abi;
    table!(native, x86_64);
    table!(compat, x86);
    pub(super) const NATIVE: Abi = Abi {
        audit: 0xc000_003e,
        number: native,
        has_x32: true,
    };
    pub(super) const COMPAT: Abi = Abi {
        audit: 0x4000_0003,
        number: compat,
        has_x32: false,
    };
}

#[cfg(target_arch = "aarch64")]
mod native {
    use super::Abi;
    table!(native, aarch64);
    table!(compat, arm);
    pub(super) const NATIVE: Abi = Abi {
        audit: 0xc000_00b7,
        number: native,
        has_x32: false,
    };
    pub(super) const COMPAT: Abi = Abi {
        audit: 0x4000_0028,
        number: compat,
        has_x32: false,
    };
}

use native::{COMPAT, NATIVE};

/// What a call meets.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Verdict {
    Always(u32),
    /// Alternatives in order; the default if none holds.
    If(Vec<(Vec<LinuxSeccompArg>, u32)>),
}

/// Compiles a profile.
///
/// # Errors
/// It asks for something we leave to runc: notifications, or more rules than a program can hold.
pub fn compile(profile: &LinuxSeccomp) -> Result<Seccomp, Unsupported> {
    if profile.listener_path().is_some() || profile.listener_metadata().is_some() {
        return Err("linux.seccomp.listenerPath".into());
    }
    let flags = flags(profile)?;
    let otherwise = action(profile.default_action(), profile.default_errno_ret())?;
    let architectures = profile.architectures().as_deref().unwrap_or_default();
    let listed = |wanted: &[Arch]| architectures.iter().any(|arch| wanted.contains(arch));

    let mut program = vec![statement(LOAD, ARCHITECTURE)];
    let mut abis = vec![NATIVE];
    if listed(&[Arch::ScmpArchX86, Arch::ScmpArchArm]) {
        abis.push(COMPAT);
    }
    for abi in abis {
        let mut block = vec![statement(LOAD, NUMBER)];
        let verdicts = verdicts(profile, abi, otherwise)?;
        if abi.has_x32 {
            // The bit counts from the number; without the ABI in the list, it is a foreign one.
            let x32 = if listed(&[Arch::ScmpArchX32]) {
                tree(&verdicts, X32, otherwise)
            } else {
                vec![statement(RETURN, KILL_PROCESS)]
            };
            let native = tree(&verdicts, 0, otherwise);
            block.extend(branch(X32, &x32, &native));
        } else {
            block.extend(tree(&verdicts, 0, otherwise));
        }
        // On to the next ABI if it is not this one; the block may be longer than a short jump.
        program.push(compare(EQUAL, abi.audit, 1, 0));
        program.push(statement(JUMP, length(&block)));
        program.extend(block);
    }
    program.push(statement(RETURN, KILL_PROCESS));
    if program.len() > MAX_PROGRAM {
        return Err("linux.seccomp.syscalls: too many for one program".into());
    }
    Ok(Seccomp { flags, program })
}

fn flags(profile: &LinuxSeccomp) -> Result<u32, Unsupported> {
    // As runc: without a word, no mitigation of speculative store bypass.
    let Some(flags) = profile.flags() else {
        return Ok(1 << 2);
    };
    flags.iter().try_fold(0, |bits, flag| match flag {
        LinuxSeccompFilterFlag::SeccompFilterFlagLog => Ok(bits | (1 << 1)),
        LinuxSeccompFilterFlag::SeccompFilterFlagSpecAllow => Ok(bits | (1 << 2)),
        // One thread installs it: there is nothing to synchronise.
        LinuxSeccompFilterFlag::SeccompFilterFlagTsync => Ok(bits),
        #[allow(unreachable_patterns, reason = "later versions of the specification")]
        other => Err(format!("linux.seccomp.flags: {other:?}")),
    })
}

/// `SECCOMP_RET_*` of an action.
fn action(action: LinuxSeccompAction, errno: Option<u32>) -> Result<u32, Unsupported> {
    let data = errno.unwrap_or(libc::EPERM.cast_unsigned()) & 0xffff;
    Ok(match action {
        LinuxSeccompAction::ScmpActKill | LinuxSeccompAction::ScmpActKillThread => 0,
        LinuxSeccompAction::ScmpActKillProcess => KILL_PROCESS,
        LinuxSeccompAction::ScmpActTrap => 0x0003_0000,
        LinuxSeccompAction::ScmpActErrno => 0x0005_0000 | data,
        LinuxSeccompAction::ScmpActTrace => 0x7ff0_0000 | data,
        LinuxSeccompAction::ScmpActLog => 0x7ffc_0000,
        LinuxSeccompAction::ScmpActAllow => 0x7fff_0000,
        LinuxSeccompAction::ScmpActNotify => {
            return Err("linux.seccomp.syscalls: SCMP_ACT_NOTIFY".into());
        }
    })
}

/// What each call of the profile meets, by number.
fn verdicts(
    profile: &LinuxSeccomp,
    abi: Abi,
    otherwise: u32,
) -> Result<BTreeMap<u32, Verdict>, Unsupported> {
    let mut verdicts = BTreeMap::new();
    for rule in profile.syscalls().iter().flatten() {
        let value = action(rule.action(), rule.errno_ret())?;
        for number in rule.names().iter().filter_map(|name| (abi.number)(name)) {
            add(&mut verdicts, number, rule, value)?;
        }
    }
    // runc's stub, before the verdicts that equal the default are dropped for size.
    let newest = verdicts.keys().next_back().copied();
    let eperm = 0x0005_0000 | libc::EPERM.cast_unsigned();
    if let (Some(newest), true) = (newest, otherwise == eperm) {
        let enosys = 0x0005_0000 | libc::ENOSYS.cast_unsigned();
        verdicts.insert(newest + 1, Verdict::Always(enosys));
    }
    Ok(verdicts)
}

fn add(
    verdicts: &mut BTreeMap<u32, Verdict>,
    number: u32,
    rule: &LinuxSyscall,
    value: u32,
) -> Result<(), Unsupported> {
    let args = rule.args().as_deref().unwrap_or_default();
    if args.iter().any(|arg| arg.index() > 5) {
        return Err("linux.seccomp.syscalls.args.index".into());
    }
    let verdict = verdicts
        .entry(number)
        .or_insert_with(|| Verdict::If(Vec::new()));
    let Verdict::If(alternatives) = verdict else {
        return Ok(());
    };
    if args.is_empty() {
        *verdict = Verdict::Always(value);
        return Ok(());
    }
    let repeated = args.iter().any(|arg| {
        args.iter()
            .filter(|other| other.index() == arg.index())
            .count()
            > 1
    });
    if repeated {
        alternatives.extend(args.iter().map(|arg| (vec![*arg], value)));
    } else {
        alternatives.push((args.to_vec(), value));
    }
    Ok(())
}

/// A binary search over the call's number, which is in the accumulator.
fn tree(verdicts: &BTreeMap<u32, Verdict>, base: u32, otherwise: u32) -> Vec<Instruction> {
    // Runs of neighbours with one verdict, each with its first number.
    let nothing = Verdict::Always(otherwise);
    let mut runs: Vec<(u32, &Verdict)> = vec![(0, &nothing)];
    let mut push = |first: u32, verdict| {
        if runs.last().is_none_or(|(_, last)| *last != verdict) {
            runs.push((first, verdict));
        }
    };
    let mut next = base;
    let last = verdicts.keys().next_back().copied();
    for (number, verdict) in verdicts {
        let number = base + number;
        if number > next {
            push(next, &nothing);
        }
        push(number, verdict);
        next = number + 1;
    }
    // The ENOSYS of calls that came later goes on to the end; any other last verdict does not.
    let enosys = Verdict::Always(0x0005_0000 | libc::ENOSYS.cast_unsigned());
    if last.and_then(|last| verdicts.get(&last)) != Some(&enosys) {
        push(next, &nothing);
    }
    search(&runs, otherwise)
}

fn search(runs: &[(u32, &Verdict)], otherwise: u32) -> Vec<Instruction> {
    match runs {
        [] => vec![statement(RETURN, otherwise)],
        [(_, verdict)] => leaf(verdict, otherwise),
        _ => {
            let (low, high) = runs.split_at(runs.len() / 2);
            let first = high.first().map_or(0, |(first, _)| *first);
            branch(first, &search(high, otherwise), &search(low, otherwise))
        }
    }
}

/// `high` if the accumulator is at least `first`, else `low`; both return.
fn branch(first: u32, high: &[Instruction], low: &[Instruction]) -> Vec<Instruction> {
    let mut code = Vec::with_capacity(high.len() + low.len() + 2);
    // Conditional jumps reach 255 instructions, unconditional ones everything.
    if let Ok(distance) = u8::try_from(low.len()) {
        code.push(compare(AT_LEAST, first, distance, 0));
    } else {
        code.push(compare(AT_LEAST, first, 0, 1));
        code.push(statement(JUMP, length(low)));
    }
    code.extend_from_slice(low);
    code.extend_from_slice(high);
    code
}

fn leaf(verdict: &Verdict, otherwise: u32) -> Vec<Instruction> {
    match verdict {
        Verdict::Always(value) => vec![statement(RETURN, *value)],
        Verdict::If(alternatives) => {
            let mut code = Vec::new();
            for (args, value) in alternatives {
                code.extend(alternative(args, *value));
            }
            code.push(statement(RETURN, otherwise));
            code
        }
    }
}

/// Where a comparison goes on.
#[derive(Clone, Copy, PartialEq, Eq)]
enum To {
    Next,
    /// The condition holds: after it.
    Pass,
    /// It does not: the next alternative.
    Fail,
}

enum Draft {
    Plain(Instruction),
    Test(u16, u32, To, To),
}

/// Returns `value` if all conditions hold, else falls through.
fn alternative(args: &[LinuxSeccompArg], value: u32) -> Vec<Instruction> {
    let conditions: Vec<Vec<Draft>> = args.iter().map(condition).collect();
    let total: usize = conditions.iter().map(Vec::len).sum::<usize>() + 1;
    let mut code = Vec::with_capacity(total);
    for draft in conditions {
        let end = code.len() + draft.len();
        for step in draft {
            let after = code.len() + 1;
            let distance = |to: To| {
                let target = match to {
                    To::Next => after,
                    To::Pass => end,
                    To::Fail => total,
                };
                // Six conditions of at most seven instructions: always within reach.
                u8::try_from(target - after).unwrap_or(u8::MAX)
            };
            code.push(match step {
                Draft::Plain(instruction) => instruction,
                Draft::Test(code, k, yes, no) => compare(code, k, distance(yes), distance(no)),
            });
        }
    }
    code.push(statement(RETURN, value));
    code
}

/// Compares one 64-bit argument, high word first.
fn condition(arg: &LinuxSeccompArg) -> Vec<Draft> {
    use To::{Fail, Next, Pass};
    let words = |value: u64| {
        let [a, b, c, d, e, f, g, h] = value.to_le_bytes();
        (
            u32::from_le_bytes([e, f, g, h]),
            u32::from_le_bytes([a, b, c, d]),
        )
    };
    let place = u32::try_from(arg.index()).unwrap_or_default() * 8 + ARGUMENTS;
    let load = |word: u32| {
        // The low word comes first on little-endian machines, which are all we build for.
        Draft::Plain(statement(LOAD, place + word))
    };
    let (high, low) = words(arg.value());
    let order = |strict: u16, pass: To, fail: To| {
        vec![
            load(4),
            Draft::Test(GREATER, high, pass, Next),
            Draft::Test(EQUAL, high, Next, fail),
            load(0),
            Draft::Test(strict, low, pass, fail),
        ]
    };
    match arg.op() {
        LinuxSeccompOperator::ScmpCmpEq => vec![
            load(4),
            Draft::Test(EQUAL, high, Next, Fail),
            load(0),
            Draft::Test(EQUAL, low, Pass, Fail),
        ],
        LinuxSeccompOperator::ScmpCmpNe => vec![
            load(4),
            Draft::Test(EQUAL, high, Next, Pass),
            load(0),
            Draft::Test(EQUAL, low, Fail, Pass),
        ],
        LinuxSeccompOperator::ScmpCmpGt => order(GREATER, Pass, Fail),
        LinuxSeccompOperator::ScmpCmpGe => order(AT_LEAST, Pass, Fail),
        LinuxSeccompOperator::ScmpCmpLe => order(GREATER, Fail, Pass),
        LinuxSeccompOperator::ScmpCmpLt => order(AT_LEAST, Fail, Pass),
        LinuxSeccompOperator::ScmpCmpMaskedEq => {
            let (mask_high, mask_low) = (high, low);
            let (high, low) = words(arg.value_two().unwrap_or_default() & arg.value());
            vec![
                load(4),
                Draft::Plain(statement(AND, mask_high)),
                Draft::Test(EQUAL, high, Next, Fail),
                load(0),
                Draft::Plain(statement(AND, mask_low)),
                Draft::Test(EQUAL, low, Pass, Fail),
            ]
        }
    }
}

fn statement(code: u16, k: u32) -> Instruction {
    Instruction {
        code,
        jt: 0,
        jf: 0,
        k,
    }
}

fn compare(code: u16, k: u32, jt: u8, jf: u8) -> Instruction {
    Instruction { code, jt, jf, k }
}

fn length(code: &[Instruction]) -> u32 {
    u32::try_from(code.len()).unwrap_or(u32::MAX)
}

#[cfg(test)]
mod tests;
