"""Calls of frameworks that this Python cannot install, in their order and with their options.

R2E-Gym: `src/r2egym/agenthub/runtime/docker.py`, backend kubernetes. Harbor 0.26.0:
`harbor/environments/gke.py`.
"""

import io
import tarfile
import time
import unittest
import uuid

from kubernetes.client.rest import ApiException

from cluster import DEADLINE, ClusterTest


def archive(name, data):
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        entry = tarfile.TarInfo(name)
        entry.size = len(data)
        tar.addfile(entry, io.BytesIO(data))
    return buffer.getvalue()


class R2EGym(ClusterTest):
    def test_a_rollout(self):
        name = str(uuid.uuid4())
        # Nobody ever attaches: its open terminal is what keeps the shell alive.
        container = {
            "command": ["/bin/sh", "-c"],
            "args": ["/bin/sh -l"],
            "stdin": True,
            "tty": True,
            "env": [{"name": "PATH", "value": "/root/.venv/bin:/usr/bin:/bin:/usr/sbin:/sbin"}],
            "resources": {"requests": {"cpu": "10m", "memory": "16Mi"}},
        }
        pod = self.start(name, container, imagePullSecrets=[{"name": "not-there"}])
        for step in range(3):
            command = ["/bin/sh", "-c", f"cd /tmp && timeout 90 echo step {step}"]
            self.assertEqual(self.run_to_end(name, command), (0, f"step {step}\n", ""))
        # One frame, then close; the next call relies on the file.
        upload = self.exec(name, ["tar", "xmf", "-", "-C", "/tmp"], stdin=True)
        upload.write_stdin(archive("patch.diff", b"x" * (2 << 20)))
        upload.close()
        self.assertEqual(self.run_to_end(name, ["test", "-f", "/tmp/patch.diff"])[0], 0)
        self.assertEqual(
            self.run_to_end(name, ["sh", "-c", "wc -c < /tmp/patch.diff"])[1].strip(),
            str(2 << 20),
        )
        # A deadline ends the command and is told by its code.
        code, _, _ = self.run_to_end(name, ["/bin/sh", "-c", "timeout 1 sleep 60"])
        self.assertIn(code, (124, 143))
        pod = self.api.read_namespaced_pod(name, self.namespace)
        self.assertEqual(pod.status.container_statuses[0].restart_count, 0)
        self.api.delete_namespaced_pod(name, self.namespace, grace_period_seconds=0)
        self.wait(pod, lambda _: False)


class Harbor(ClusterTest):
    def body(self):
        pod = self.pod("main", {"args": ["sleep", "infinity"]})
        pod["metadata"] = {"name": "trial", "labels": {"app": "sandbox", "session": "s"}}
        pod["spec"]["containers"][0]["securityContext"] = {"runAsUser": 0, "runAsGroup": 0}
        return pod

    def create(self):
        """Created again after a conflict, as the framework does."""
        try:
            self.api.create_namespaced_pod(self.namespace, self.body())
        except ApiException as error:
            if error.status != 409:
                raise
            self.delete()
            self.api.create_namespaced_pod(self.namespace, self.body())
        end = time.monotonic() + DEADLINE
        while time.monotonic() < end:
            pod = self.api.read_namespaced_pod("trial", self.namespace)
            statuses = pod.status.container_statuses or []
            if pod.status.phase == "Running" and statuses and all(s.ready for s in statuses):
                return
            time.sleep(1)
        self.fail(f"not ready: {pod.status}")

    def delete(self):
        self.api.delete_namespaced_pod(
            "trial", self.namespace, grace_period_seconds=0, propagation_policy="Foreground"
        )
        end = time.monotonic() + 60
        while time.monotonic() < end:
            try:
                self.api.read_namespaced_pod("trial", self.namespace)
            except ApiException as error:
                self.assertEqual(error.status, 404)
                return
            time.sleep(0.2)
        self.fail("the pod does not go")

    def test_a_trial(self):
        self.create()
        # Ready means that exec works, not that it will.
        self.assertEqual(self.run_to_end("trial", ["true"])[0], 0)
        upload = self.exec("trial", ["tar", "xf", "-", "-C", "/tmp"], stdin=True)
        upload.write_stdin(archive("task.bin", b"\0" * (60 << 20)))
        upload.run_forever(timeout=1)
        upload.close()
        _, size, _ = self.run_to_end("trial", ["sh", "-c", "wc -c < /tmp/task.bin"])
        self.assertEqual(size.strip(), str(60 << 20))
        download = self.exec("trial", ["tar", "cf", "-", "/etc/passwd"])
        download.run_forever(timeout=DEADLINE)
        self.assertEqual(download.returncode, 0)
        # The name is taken: 409, then deleted and made again.
        self.create()
        self.assertNotEqual(self.run_to_end("trial", ["test", "-e", "/tmp/task.bin"])[0], 0)
        self.delete()


if __name__ == "__main__":
    unittest.main()
