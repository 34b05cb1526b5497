"""What the client tests share: a namespace of their own, pods for the virtual node, waits by watch.

Everything here uses the Kubernetes client under test as its users do.
"""

import os
import unittest
import uuid

from kubernetes import client, config, watch
from kubernetes.stream import stream

DEADLINE = 120


def image(name):
    return f"{os.environ['SANDMAN_REGISTRY']}/sandman/{name}:1"


class ClusterTest(unittest.TestCase):
    """A test class with a namespace, deleted with all that is in it."""

    @classmethod
    def setUpClass(cls):
        config.load_kube_config(os.environ["KUBECONFIG"])
        cls.api = client.CoreV1Api()
        cls.namespace = f"clients-{uuid.uuid4().hex[:8]}"
        cls.api.create_namespace({"metadata": {"name": cls.namespace}})
        # Pods are refused until the controller manager made this account.
        accounts = watch.Watch()
        for event in accounts.stream(
            cls.api.list_namespaced_service_account, cls.namespace, timeout_seconds=DEADLINE
        ):
            if event["object"].metadata.name == "default":
                return
        raise TimeoutError("the namespace has no service account")

    @classmethod
    def tearDownClass(cls):
        cls.api.delete_namespace(cls.namespace)

    @staticmethod
    def pod(name, container, **spec):
        """A pod of one container that the virtual node takes."""
        return {
            "metadata": {"name": name},
            "spec": {
                "restartPolicy": "Never",
                "terminationGracePeriodSeconds": 0,
                "nodeSelector": {"type": "virtual-kubelet"},
                "tolerations": [
                    {"key": "virtual-kubelet.io/provider", "operator": "Exists"}
                ],
                "containers": [{"name": name, "image": image("busybox"), **container}],
                **spec,
            },
        }

    @classmethod
    def start(cls, name, container=None, **spec):
        """Creates a pod and returns it once its container runs."""
        container = container or {"command": ["sleep", "1000000"]}
        created = cls.api.create_namespaced_pod(
            cls.namespace, cls.pod(name, container, **spec)
        )
        return cls.wait(created, lambda pod: pod.status.phase == "Running")

    @classmethod
    def wait(cls, pod, reached):
        """Watches from a pod's own version, as R2E-Gym does."""
        if reached(pod):
            return pod
        events = watch.Watch().stream(
            cls.api.list_namespaced_pod,
            cls.namespace,
            field_selector=f"metadata.name={pod.metadata.name}",
            resource_version=pod.metadata.resource_version,
            timeout_seconds=DEADLINE,
        )
        last = pod
        for event in events:
            last = event["object"]
            if event["type"] == "DELETED" or reached(last):
                return last
        raise TimeoutError(f"{pod.metadata.name}: {last.status}")

    @classmethod
    def exec(cls, name, command, **options):
        """An exec that is not run yet, by the client's own WebSocket code."""
        streams = {"stdin": False, "stdout": True, "stderr": True, "tty": False, **options}
        return stream(
            # stream() changes the client that it is given while it connects.
            client.CoreV1Api(client.ApiClient()).connect_get_namespaced_pod_exec,
            name,
            cls.namespace,
            command=command,
            _preload_content=False,
            **streams,
        )

    @classmethod
    def run_to_end(cls, name, command):
        """Exit code and both outputs."""
        running = cls.exec(name, command)
        running.run_forever(timeout=DEADLINE)
        return running.returncode, running.read_stdout(), running.read_stderr()
