"""Daemons in a cluster of Kubernetes: one for each pod of a StatefulSet."""

from __future__ import annotations

import json
from pathlib import Path

from agora.cli.launch_jobs.job import LEAVE_TIMEOUT_S, Command, Job, LaunchRequest


def write_job(request: LaunchRequest, label: str, invite: str, folder: Path) -> Job:
    kind, _, number = request.gpus.partition(":")
    limits = f"\n          resources:\n            limits:\n              nvidia.com/gpu: {number or 1}" if kind else ""
    chosen = f"\n      nodeSelector:\n        nvidia.com/gpu.product: {json.dumps(kind)}" if kind else ""
    text = f"""\
# One daemon for each pod, with a volume of its own: its key, checkpoints and caches survive a restart.
apiVersion: v1
kind: Secret
metadata:
  name: {label}
stringData:
  invite: {json.dumps(invite)}
---
apiVersion: apps/v1
kind: StatefulSet
metadata:
  name: {label}
spec:
  serviceName: {label}
  replicas: {request.count}
  podManagementPolicy: Parallel
  selector:
    matchLabels:
      app: {label}
  template:
    metadata:
      labels:
        app: {label}
    spec:
      terminationGracePeriodSeconds: {LEAVE_TIMEOUT_S}
      # The variables AGORA_..._PORT of services would be taken for settings.
      enableServiceLinks: false
      securityContext:
        runAsNonRoot: true
        runAsUser: 10001
        fsGroup: 10001{chosen}
      containers:
        - name: agora-node
          image: {json.dumps(request.image)}
          args: ["join", "/run/agora-invite/invite", "--dir", "/data", "--device", "all"]
          env:
            - name: AGORA_RUNTIME_DIR
              value: /tmp/agora{limits}
          securityContext:
            allowPrivilegeEscalation: false
            capabilities:
              drop: ["ALL"]
          volumeMounts:
            - name: data
              mountPath: /data
            - name: invite
              mountPath: /run/agora-invite
              readOnly: true
      volumes:
        - name: invite
          secret:
            secretName: {label}
            defaultMode: 0440
  volumeClaimTemplates:
    - metadata:
        name: data
      spec:
        accessModes: ["ReadWriteOnce"]
        resources:
          requests:
            storage: 50Gi
"""
    file = str(folder / "job.yaml")
    return Job(
        files={"job.yaml": text},
        up=(Command(("kubectl", "apply", "-f", file)),),
        down=(Command(("kubectl", "delete", "-f", file)),),  # the volumes stay
        logs=f"kubectl logs -f -l app={label}",
    )
