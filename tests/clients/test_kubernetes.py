"""The official Python client: exec, attach and port-forward over WebSocket.

Releases before 37 offer v4 of the protocol only, in which input cannot be ended.
"""

import hashlib
import http.client
import random
import socket
import threading
import time
import unittest

import kubernetes
from kubernetes import client
from kubernetes.client.rest import ApiException
from kubernetes.stream import portforward, stream

from cluster import DEADLINE, ClusterTest, image

MAJOR = int(kubernetes.__version__.split(".")[0])


class Exec(ClusterTest):
    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        cls.start("box")

    def test_exit_codes(self):
        for code in (0, 1, 3, 126, 127, 137, 255):
            with self.subTest(code=code):
                found = self.run_to_end("box", ["sh", "-c", f"echo out; echo err >&2; exit {code}"])
                self.assertEqual(found, (code, "out\n", "err\n"))

    def test_a_missing_command_is_named(self):
        running = self.exec("box", ["no-such-command"])
        running.run_forever(timeout=DEADLINE)
        error = running.read_channel(3)
        self.assertIn("error finding executable", error)
        self.assertIn("executable file not found in $PATH", error)

    def test_an_unknown_container_is_refused(self):
        with self.assertRaises(ApiException) as caught:
            self.exec("box", ["true"], container="nobody")
        self.assertIn("nobody", str(caught.exception))

    def test_text_and_bytes_reach_stdin(self):
        running = self.exec("box", ["sh", "-c", "read a; read b; echo $b $a"], stdin=True)
        running.write_stdin("one\n")
        running.write_stdin(b"two\n")
        running.run_forever(timeout=DEADLINE)
        self.assertEqual(running.read_stdout(), "two one\n")
        self.assertEqual(running.returncode, 0)

    def test_a_single_frame_of_64_mib(self):
        """Reset of the connection when one frame is tens of MiB; input that arrives empty."""
        data = random.Random(1).randbytes(64 << 20)
        digest = hashlib.sha256(data).hexdigest()
        command = ["sh", "-c", f"head -c {len(data)} | sha256sum"]
        running = self.exec("box", command, stdin=True)
        running.write_stdin(data)
        running.run_forever(timeout=DEADLINE)
        self.assertEqual(running.read_stdout().split()[0], digest)

    def test_a_closed_connection_has_delivered_its_input(self):
        """write_file leaves an empty or truncated file; worse with many at once."""
        def upload(number):
            data = random.Random(number).randbytes(3 << 20)
            running = self.exec("box", ["sh", "-c", f"cat > /tmp/up-{number}"], stdin=True)
            running.write_stdin(data)
            running.close()
            code, out, _ = self.run_to_end("box", ["sha256sum", f"/tmp/up-{number}"])
            found[number] = code == 0 and out.split()[0] == hashlib.sha256(data).hexdigest()

        found = {}
        threads = [threading.Thread(target=upload, args=(number,)) for number in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        self.assertEqual(found, {number: True for number in range(8)})

    def test_a_background_child_does_not_hold_the_exec(self):
        """exec hangs while a background child holds stdout."""
        code, out, _ = self.run_to_end("box", ["sh", "-c", "sleep 4321 & echo started"])
        self.assertEqual((code, out), (0, "started\n"))
        _, out, _ = self.run_to_end("box", ["ps"])
        self.assertIn("sleep 4321", out)

    @unittest.skipIf(MAJOR < 37, "the client has no way to end its input")
    def test_input_ends(self):
        running = self.exec("box", ["cat"], stdin=True)
        running.write_stdin("hello")
        running.close_channel(0)
        running.run_forever(timeout=DEADLINE)
        self.assertEqual((running.returncode, running.read_stdout()), (0, "hello"))

    def test_keepalives_on_the_resize_channel_change_nothing(self):
        running = self.exec("box", ["sh", "-c", "read a; echo $a"], stdin=True)
        for _ in range(3):
            running.write_channel(4, '{"Width":80,"Height":24}')
        running.write_stdin("still here\n")
        running.run_forever(timeout=DEADLINE)
        self.assertEqual((running.returncode, running.read_stdout()), (0, "still here\n"))


class Attach(ClusterTest):
    def attach(self, name, **options):
        streams = {"stdin": True, "stdout": True, "stderr": True, "tty": False, **options}
        return stream(
            client.CoreV1Api(client.ApiClient()).connect_get_namespaced_pod_attach,
            name,
            self.namespace,
            _preload_content=False,
            **streams,
        )

    def until(self, attached, text):
        seen, end = "", time.monotonic() + DEADLINE
        while text not in seen and time.monotonic() < end:
            self.assertTrue(attached.is_open(), seen)
            seen += attached.read_stdout(timeout=1)
        self.assertIn(text, seen)

    def test_two_clients_of_one_shell(self):
        self.start("shell", {"command": ["sh"], "stdin": True, "tty": True})
        first = self.attach("shell", tty=True, stderr=False)
        second = self.attach("shell", tty=True, stderr=False)
        # What a client hears of its own tells that it is there.
        first.write_stdin("echo a'b'c\n")
        self.until(first, "abc")
        second.write_stdin("echo x'y'z\n")
        self.until(second, "xyz")
        self.until(first, "xyz")
        first.close()
        second.write_stdin("echo d'e'f; exit 3\n")
        self.until(second, "def")
        second.run_forever(timeout=DEADLINE)
        pod = self.wait(
            self.api.read_namespaced_pod("shell", self.namespace),
            lambda pod: pod.status.phase == "Failed",
        )
        ended = pod.status.container_statuses[0].state.terminated
        self.assertEqual(ended.exit_code, 3)


SERVER = """
import http.server
class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    def do_POST(self):
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body[::-1])
server = http.server.ThreadingHTTPServer(("127.0.0.1", 8080), Handler)
print("serving", flush=True)
server.serve_forever()
"""


class PortForward(ClusterTest):
    def test_requests_and_a_port_without_a_listener(self):
        container = {"image": image("python-swe"), "command": ["python3", "-c", SERVER]}
        self.start("web", container)
        log = self.api.read_namespaced_pod_log(
            "web", self.namespace, follow=True, _preload_content=False
        )
        self.assertIn(b"serving", next(log.stream(64)))
        log.close()

        forward = portforward(
            self.api.connect_get_namespaced_pod_portforward,
            "web",
            self.namespace,
            ports="8080,8081",
        )
        raw = forward.socket(8080)
        raw.setblocking(True)
        connection = http.client.HTTPConnection("forwarded")
        connection.sock = raw
        data = random.Random(2).randbytes(5 << 20)
        for _ in range(3):
            connection.request("POST", "/", body=data)
            self.assertEqual(connection.getresponse().read(), data[::-1])
        refused = forward.socket(8081)
        refused.setblocking(True)
        refused.settimeout(DEADLINE)
        try:
            refused.sendall(b"hello")
            self.assertEqual(refused.recv(1), b"")
        except (ConnectionError, socket.timeout) as error:
            self.assertIsInstance(error, ConnectionError)
        self.assertIn("connection refused", forward.error(8081))


if __name__ == "__main__":
    unittest.main()
