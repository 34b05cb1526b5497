//! System calls that no sandbox may make, asked for directly.

use anyhow::Result;
use sandman_integration::{Scope, images};

use crate::attack::both_held;

/// Makes each call in a child of its own. "Not permitted", "no access" and "no such call" are
/// refusals; any other error says that the question was wrong, and is no defence.
const SCRIPT: &str = r#"
import ctypes, errno, os, struct, sys
libc = ctypes.CDLL(None, use_errno=True)
text = lambda words: ctypes.c_char_p(words.encode())
data = lambda words: ctypes.create_string_buffer(words, len(words))
zero = ctypes.c_void_p(0)
here = ctypes.c_long(-100)
namespace = lambda kind: ctypes.c_long(os.open('/proc/1/ns/' + kind, 0))
open('/tmp/file', 'wb').write(bytes(65536))
perf = struct.pack('IIQQ', 1, 112, 0, 0) + bytes(112 - 24)
CALLS = {
    'mount': (165, text('none'), text('/tmp'), text('tmpfs'), 0, zero),
    'umount2': (166, text('/proc'), 2),
    'pivot_root': (155, text('/'), text('/tmp')),
    'fsopen': (430, text('tmpfs'), 0),
    'open_tree': (428, here, text('/'), 1),
    'mount_setattr': (442, here, text('/'), 0, data(bytes(32)), 32),
    'move_mount': (429, here, text('/tmp'), here, text('/var'), 0),
    'swapon': (167, text('/tmp/file'), 0),
    'swapoff': (168, text('/tmp/file')),
    'init_module': (175, zero, 0, text('')),
    'finit_module': (313, 0, text(''), 0),
    'delete_module': (176, text('sandman_none'), 2048),
    'kexec_load': (246, 0, 0, zero, 0),
    'bpf': (321, 11, data(bytes(120)), 120),
    'perf_event_open': (298, data(perf), -1, 0, -1, 0),
    'open_by_handle_at': (304, here, data(struct.pack('IiQ', 8, 1, 2)), 0),
    'acct': (163, text('/tmp/file')),
    'settimeofday': (164, zero, zero),
    'adjtimex': (159, data(struct.pack('I', 8) + bytes(204))),
    'iopl': (172, 3),
    'ioperm': (173, 0x80, 1, 1),
    'reboot': (169, 0xfee1dead, 672274793, 0, zero),
    'sethostname': (170, text('x'), 1),
    'setdomainname': (171, text('x'), 1),
    'syslog': (103, 9, zero, 0),
    'unshare_mount': (272, 0x20000),
    'unshare_cgroup': (272, 0x2000000),
    'unshare_uts': (272, 0x4000000),
    'unshare_ipc': (272, 0x8000000),
    'unshare_pid': (272, 0x20000000),
    'unshare_net': (272, 0x40000000),
    'setns_mount': (308, namespace('mnt'), 0),
    'setns_net': (308, namespace('net'), 0),
    'userfaultfd': (323, 0),
    'fanotify': (300, 4, 0),
    'vhangup': (153,),
    'setpriority': (141, 0, 0, -5),
    'sched_fifo': (144, 0, 1, data(struct.pack('i', 1))),
    'io_real_time': (251, 1, 0, 1 << 13),
    'limit_of_files': (302, 0, 7, data(struct.pack('QQ', 1 << 29, 1 << 29)), zero),
    'capset': (126, data(struct.pack('Ii', 0x20080522, 0)), data(b'\xff' * 24)),
}
REFUSED = (errno.EPERM, errno.EACCES, errno.ENOSYS)

def attack(number, *args):
    result = libc.syscall(ctypes.c_long(number), *args)
    return 0 if result >= 0 else ctypes.get_errno()

def escape():
    'The classic way out of a chroot: a folder kept open above it.'
    os.makedirs('/tmp/root', exist_ok=True)
    above = os.open('/', 0)
    os.chroot('/tmp/root')
    os.fchdir(above)
    for _ in range(64):
        os.chdir('..')
    os.chroot('.')
    return 0 if os.path.exists(os.environ['MARKER']) else errno.EPERM

def outer_processes():
    'PID 1 is the first of this sandbox, and of nothing around it that could be seen.'
    with open('/proc/1/status') as status:
        return 0 if 'NSpid:\t1\t' in status.read() else errno.EPERM

def judge(name, call):
    reader, writer = os.pipe()
    if os.fork() == 0:
        try:
            code = call()
        except OSError as error:
            code = error.errno
        os.write(writer, struct.pack('i', code))
        os._exit(0)
    os.close(writer)
    code = struct.unpack('i', os.read(reader, 4) or struct.pack('i', errno.EPERM))[0]
    os.close(reader)
    os.wait()
    verdict = 'BROKEN' if code == 0 else 'held' if code in REFUSED else 'UNTRIED'
    print(verdict, name, *([] if verdict == 'held' else [os.strerror(code)]), flush=True)

for name, call in CALLS.items():
    judge(name, lambda: attack(*call))
judge('chroot', escape)
judge('outer_processes', outer_processes)
"#;

/// The names in the script, in order.
fn names() -> Vec<&'static str> {
    let calls = SCRIPT
        .lines()
        .skip_while(|line| !line.starts_with("CALLS"))
        .skip(1)
        .take_while(|line| *line != "}")
        .filter_map(|line| line.trim().strip_prefix('\'')?.split('\'').next());
    calls.chain(["chroot", "outer_processes"]).collect()
}

#[test]
#[ignore = "needs a dev cluster: see main.rs"]
fn system_calls_hold() {
    Scope::run(|scope| async move {
        let image = images::python(&scope.cluster);
        let result: Result<()> =
            both_held(&scope, &image, &["python3", "-c", SCRIPT], &names()).await;
        result
    });
}
