//! Runs compiled programs in a small interpreter of classic BPF, and compares with what the
//! profile says.

use super::*;

const ALLOW: u32 = 0x7fff_0000;
const EPERM: u32 = 0x0005_0001;
const ENOSYS: u32 = 0x0005_0026;

fn profile(json: serde_json::Value) -> LinuxSeccomp {
    serde_json::from_value(json).unwrap()
}

/// What the kernel would answer.
fn run(program: &[Instruction], audit: u32, number: u32, args: [u64; 6]) -> u32 {
    let mut data = Vec::new();
    data.extend(number.to_le_bytes());
    data.extend(audit.to_le_bytes());
    data.extend(0_u64.to_le_bytes());
    args.iter().for_each(|arg| data.extend(arg.to_le_bytes()));
    let (mut at, mut accumulator) = (0, 0_u32);
    loop {
        let Instruction { code, jt, jf, k } = program[at];
        at += 1;
        let taken = |yes: bool| usize::from(if yes { jt } else { jf });
        match code {
            LOAD => {
                let word = data[k as usize..][..4].try_into().unwrap();
                accumulator = u32::from_le_bytes(word);
            }
            AND => accumulator &= k,
            JUMP => at += k as usize,
            EQUAL => at += taken(accumulator == k),
            GREATER => at += taken(accumulator > k),
            AT_LEAST => at += taken(accumulator >= k),
            RETURN => return k,
            other => panic!("{other:#x}"),
        }
    }
}

fn number(name: &str) -> u32 {
    (NATIVE.number)(name).unwrap()
}

fn native(program: &[Instruction], name: &str, args: [u64; 6]) -> u32 {
    run(program, NATIVE.audit, number(name), args)
}

#[test]
fn every_call_meets_its_verdict() {
    let names = [
        "read", "write", "close", "getpid", "openat", "clone", "statx",
    ];
    let compiled = compile(&profile(serde_json::json!({
        "defaultAction": "SCMP_ACT_ERRNO",
        "architectures": ["SCMP_ARCH_X86_64", "SCMP_ARCH_AARCH64"],
        "syscalls": [
            {"names": names, "action": "SCMP_ACT_ALLOW"},
            {"names": ["mount", "no_such_call"], "action": "SCMP_ACT_ERRNO", "errnoRet": 38},
            {"names": ["reboot"], "action": "SCMP_ACT_KILL_PROCESS"},
            {"names": ["ptrace"], "action": "SCMP_ACT_TRAP"},
        ],
    })))
    .unwrap();
    let newest = ["statx", "mount", "reboot", "ptrace"]
        .map(number)
        .into_iter()
        .max()
        .unwrap();
    for call in 0..600 {
        let expected = if names.iter().any(|name| number(name) == call) {
            ALLOW
        } else if call == number("mount") || call > newest {
            ENOSYS
        } else if call == number("reboot") {
            KILL_PROCESS
        } else if call == number("ptrace") {
            0x0003_0000
        } else {
            EPERM
        };
        assert_eq!(
            run(&compiled.program, NATIVE.audit, call, [0; 6]),
            expected,
            "{call}"
        );
    }
    // Other ABIs are not in the list.
    assert_eq!(
        run(&compiled.program, COMPAT.audit, 3, [0; 6]),
        KILL_PROCESS
    );
    assert_eq!(compiled.flags, 1 << 2);
}

#[test]
#[cfg(target_arch = "x86_64")]
fn each_abi_has_its_own_numbers() {
    let compiled = compile(&profile(serde_json::json!({
        "defaultAction": "SCMP_ACT_ERRNO",
        "architectures": ["SCMP_ARCH_X86_64", "SCMP_ARCH_X86", "SCMP_ARCH_X32"],
        "syscalls": [{"names": ["getpid", "statx"], "action": "SCMP_ACT_ALLOW"}],
    })))
    .unwrap();
    let answer = |audit, call| run(&compiled.program, audit, call, [0; 6]);
    assert_eq!(answer(0xc000_003e, 39), ALLOW);
    assert_eq!(answer(0xc000_003e, 20), EPERM);
    assert_eq!(answer(0x4000_0003, 20), ALLOW);
    assert_eq!(answer(0x4000_0003, 39), EPERM);
    assert_eq!(answer(0xc000_003e, X32 | 39), ALLOW);
    assert_eq!(answer(0xc000_003e, X32 | 40), EPERM);
    assert_eq!(answer(0xc000_00b7, 39), KILL_PROCESS);
    // Without x32 in the list, it is an architecture that the profile does not know.
    let compiled = compile(&profile(serde_json::json!({
        "defaultAction": "SCMP_ACT_ALLOW",
        "architectures": ["SCMP_ARCH_X86_64"],
    })))
    .unwrap();
    assert_eq!(run(&compiled.program, 0xc000_003e, 39, [0; 6]), ALLOW);
    assert_eq!(
        run(&compiled.program, 0xc000_003e, X32 | 39, [0; 6]),
        KILL_PROCESS
    );
}

#[test]
fn comparisons_are_of_64_bits() {
    let values = [
        0,
        1,
        41,
        42,
        43,
        u64::from(u32::MAX),
        1 << 32,
        (1 << 32) + 42,
        u64::MAX,
    ];
    type Holds = fn(u64, u64) -> bool;
    let operators: [(&str, Holds); 6] = [
        ("SCMP_CMP_EQ", |a, b| a == b),
        ("SCMP_CMP_NE", |a, b| a != b),
        ("SCMP_CMP_LT", |a, b| a < b),
        ("SCMP_CMP_LE", |a, b| a <= b),
        ("SCMP_CMP_GT", |a, b| a > b),
        ("SCMP_CMP_GE", |a, b| a >= b),
    ];
    for (name, holds) in operators {
        for against in values {
            let compiled = compile(&profile(serde_json::json!({
                "defaultAction": "SCMP_ACT_ERRNO",
                "syscalls": [{
                    "names": ["getpid"],
                    "action": "SCMP_ACT_ALLOW",
                    "args": [{"index": 3, "value": against, "op": name}],
                }],
            })))
            .unwrap();
            for value in values {
                let got = native(&compiled.program, "getpid", [9, 9, 9, value, 9, 9]);
                let expected = if holds(value, against) { ALLOW } else { EPERM };
                assert_eq!(got, expected, "{value} {name} {against}");
            }
        }
    }
}

#[test]
fn masks_alternatives_and_conjunctions() {
    let compiled = compile(&profile(serde_json::json!({
        "defaultAction": "SCMP_ACT_ERRNO",
        "syscalls": [
            {"names": ["clone"], "action": "SCMP_ACT_ALLOW", "args": [
                {"index": 0, "value": 0x7e02_0000_u64, "valueTwo": 0, "op": "SCMP_CMP_MASKED_EQ"}]},
            {"names": ["personality"], "action": "SCMP_ACT_ALLOW", "args": [
                {"index": 0, "value": 0, "op": "SCMP_CMP_EQ"}]},
            {"names": ["personality"], "action": "SCMP_ACT_ALLOW", "args": [
                {"index": 0, "value": 8, "op": "SCMP_CMP_EQ"}]},
            {"names": ["socket"], "action": "SCMP_ACT_ALLOW", "args": [
                {"index": 0, "value": 1, "op": "SCMP_CMP_EQ"},
                {"index": 1, "value": 2, "op": "SCMP_CMP_EQ"}]},
            // Two conditions on one argument are alternatives, as in runc.
            {"names": ["kill"], "action": "SCMP_ACT_ALLOW", "args": [
                {"index": 1, "value": 0, "op": "SCMP_CMP_EQ"},
                {"index": 1, "value": 15, "op": "SCMP_CMP_EQ"}]},
            // Once without conditions, always.
            {"names": ["dup"], "action": "SCMP_ACT_ALLOW", "args": [
                {"index": 0, "value": 0, "op": "SCMP_CMP_EQ"}]},
            {"names": ["dup"], "action": "SCMP_ACT_ALLOW"},
        ],
    })))
    .unwrap();
    for (name, a, b, allowed) in [
        ("clone", 0x11, 0, true),
        ("clone", 0x1000_0011, 0, false),
        ("clone", 0x2_0000, 0, false),
        ("personality", 0, 0, true),
        ("personality", 8, 0, true),
        ("personality", 1, 0, false),
        ("socket", 1, 2, true),
        ("socket", 1, 3, false),
        ("socket", 2, 2, false),
        ("kill", 0, 15, true),
        ("kill", 0, 0, true),
        ("kill", 0, 9, false),
        ("dup", 7, 0, true),
    ] {
        let got = native(&compiled.program, name, [a, b, 0, 0, 0, 0]);
        assert_eq!(
            got,
            if allowed { ALLOW } else { EPERM },
            "{name}({a:#x}, {b})"
        );
    }
}

#[test]
fn flags_and_what_runc_has_to_do() {
    let with = |extra: serde_json::Value| {
        let mut json = serde_json::json!({"defaultAction": "SCMP_ACT_ALLOW"});
        json.as_object_mut()
            .unwrap()
            .extend(extra.as_object().unwrap().clone());
        compile(&profile(json))
    };
    let flags = with(serde_json::json!({"flags": ["SECCOMP_FILTER_FLAG_LOG"]}))
        .unwrap()
        .flags;
    assert_eq!(flags, 1 << 1);
    assert_eq!(with(serde_json::json!({"flags": []})).unwrap().flags, 0);
    for (extra, field) in [
        (serde_json::json!({"listenerPath": "/x"}), "listenerPath"),
        (
            serde_json::json!({"defaultAction": "SCMP_ACT_NOTIFY"}),
            "NOTIFY",
        ),
        (
            serde_json::json!({"syscalls": [{"names": ["dup"], "action": "SCMP_ACT_ERRNO",
                "args": [{"index": 6, "value": 0, "op": "SCMP_CMP_EQ"}]}]}),
            "args.index",
        ),
    ] {
        assert!(with(extra).unwrap_err().contains(field), "{field}");
    }
}
