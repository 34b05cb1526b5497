"""Frameworks as they are installed: inspect's sandbox without Helm, and llm-sandbox."""

import asyncio
import io
import logging
import os
import random
import tempfile
import unittest
from pathlib import Path

from cluster import ClusterTest, image


class Inspect(ClusterTest):
    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        made = cls.start("agent")
        from k8s_sandbox._pod import Pod

        cls.sandbox = Pod("agent", cls.namespace, None, "agent", made.metadata.uid, 0, "raise")

    def exec(self, command, **options):
        options = {"stdin": None, "cwd": None, "env": {}, "user": None, "timeout": 60, **options}
        return asyncio.run(self.sandbox.exec(command, **options))

    def test_exec(self):
        found = self.exec(["sh", "-c", "pwd; echo $NAME; exit 4"], cwd="/tmp", env={"NAME": "x y"})
        self.assertEqual((found.returncode, found.stdout), (4, "/tmp\nx y\n"))

    def test_large_input(self):
        """44 MiB and more of input arrive as 0 bytes, with success."""
        for size in (0, 1 << 20, 50 << 20):
            with self.subTest(size=size):
                found = self.exec(["wc", "-c"], stdin=b"x" * size)
                self.assertEqual((found.returncode, found.stdout.strip()), (0, str(size)))

    def test_a_background_child_lives_on(self):
        found = self.exec(["sh", "-c", "sleep 4000 & echo started"])
        self.assertEqual((found.returncode, found.stdout), (0, "started\n"))
        self.assertIn("sleep 4000", self.exec(["ps"]).stdout)

    def test_files(self):
        for size in (0, 5 << 20, 100 << 20):
            with self.subTest(size=size):
                data, back = random.Random(size).randbytes(size), io.BytesIO()
                asyncio.run(self.sandbox.write_file(data, Path("/tmp/file")))
                asyncio.run(self.sandbox.read_file(Path("/tmp/file"), back))
                self.assertTrue(back.getvalue() == data, "the file differs")


class LlmSandbox(ClusterTest):
    def test_a_session(self):
        from llm_sandbox.kubernetes import SandboxKubernetesSession

        manifest = {
            "apiVersion": "v1",
            "kind": "Pod",
            **self.pod("sandbox-container", {"image": image("python-swe"), "tty": True}),
        }
        manifest["metadata"] = {
            "name": "session",
            "namespace": self.namespace,
            "labels": {"app": "sandbox"},
        }
        manifest["spec"]["containers"][0]["command"] = ["python3"]
        manifest["spec"]["containers"][0]["stdin"] = True
        session = SandboxKubernetesSession(
            client=self.api,
            image=image("python-swe"),
            lang="python",
            kube_namespace=self.namespace,
            pod_manifest=manifest,
            skip_environment_setup=True,
            verbose=False,
            logger=logging.getLogger("llm-sandbox"),
        )
        session.open()
        try:
            found = session.execute_command("echo hello; echo sorry >&2; exit 5")
            self.assertEqual((found.exit_code, found.stdout.strip()), (5, "hello"))
            with tempfile.TemporaryDirectory() as folder:
                data = random.Random(3).randbytes(3 << 20)
                source, back = os.path.join(folder, "in.bin"), os.path.join(folder, "out.bin")
                with open(source, "wb") as file:
                    file.write(data)
                session.copy_to_runtime(source, "/tmp/work/in.bin")
                session.copy_from_runtime("/tmp/work/in.bin", back)
                with open(back, "rb") as file:
                    self.assertTrue(file.read() == data, "the file differs")
        finally:
            session.close()


if __name__ == "__main__":
    unittest.main()
