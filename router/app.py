"""The composition root on Ray: from a config to a running Serve application.

Owns starting and stopping Ray and the three deployments (ingress, prefill, decode). Promises that
`start` returns when every replica is ready or raises with the worker's own words, and that `stop`
leaves no process behind. What the replicas do is in `prefill`, `decode` and `router.server`; ray is
imported inside functions because Serve reads its environment variables at import.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import threading
from typing import TYPE_CHECKING, Any

import psutil

from cluster.errors import DiptychError
from cluster.types import Role
from router.directory import process_directory
from router.holds import HoldKeeper
from router.http.listener import bind
from router.server import IngressServer

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from cluster.config import Config
    from cluster.model.identity import ModelFolder

    Phase = Callable[[str], None]  # told the name of each phase as it begins

log = logging.getLogger(__name__)

APPLICATION = "diptych"
OBJECT_STORE_BYTES = 80 << 20  # nothing of ours travels through it
MAX_ONGOING = 10_000  # holds of ingresses on one worker; never a limit of ours
TRACEBACK_LINES = 12
STOP_SERVE_S = 1.0  # beyond the grace period of open streams
STOP_PROCESS_S = 2.0

_RAY_ENVIRONMENT = {
    "RAY_SERVE_THROUGHPUT_OPTIMIZED": "1",  # user code, router and actor share one event loop
    "RAY_SERVE_ENABLE_DIRECT_INGRESS": "0",  # the ingress has a listener of its own
    "RAY_SERVE_CONTROL_LOOP_INTERVAL_S": "0.2",  # 0.02 would cost a fifth of a core for ever
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_worker_niceness": "0",  # the default, 15, lets any other process stall the engines
    "TOKENIZERS_PARALLELISM": "false",
}

_MARKER = "DIPTYCH_STARTED_BY"  # in the environment of every process that Ray starts for us


class IngressReplica:
    """The Serve deployment of an ingress: `router.server` in a replica."""

    async def __init__(  # type: ignore[misc]  # Serve awaits an async __init__
        self, config: Config, folder: ModelFolder, secret: bytes, pools: dict[str, Any]
    ) -> None:
        """Take the port and serve; ready as soon as clients can connect."""
        from ray import serve

        logging.getLogger().setLevel(logging.INFO)
        rank = serve.get_replica_context().rank.rank
        taken = bind(config.http.host, config.http.port, shared=config.http.replicas > 1)
        self._grace_s = config.shutdown_grace_s
        self._server = IngressServer(
            config, folder, process_directory(), taken, secret=secret, ingress=f"ingress-{rank}"
        )
        self._holds = HoldKeeper(
            {Role(role): HandleOpener(handle) for role, handle in pools.items()},
            process_directory(),
            self._server.sessions.holds,
        )
        self._server.sessions.on_left(self._holds.review)
        self._server.start()
        self._holds.start()

    async def check_health(self) -> None:
        """Fail once the server's task has ended."""
        self._server.check()

    async def __del__(self) -> None:
        """Serve's last call before it ends the process."""
        await self._server.stop(self._grace_s)
        self._holds.stop()  # only now: until then Serve waits for the workers of open streams


class HandleOpener:
    """Opens a hold through a pool's handle."""

    def __init__(self, handle: Any) -> None:  # noqa: ANN401  # a DeploymentHandle
        """Calls go through `handle`."""
        self._hold = handle.options(stream=True).hold

    def __call__(self, target: str) -> AsyncIterator[str]:
        """Call the worker with this incarnation."""
        stream: AsyncIterator[str] = self._hold.remote(target=target)
        return stream


class RayCluster:
    """A local Ray with the application on it; made by the process that `up` is."""

    def __init__(self, config: Config, folder: ModelFolder, secret: bytes) -> None:
        """Nothing is started yet."""
        self._config = config
        self._folder = folder
        self._secret = secret
        self._daemons: list[tuple[str, psutil.Process]] = []
        self._has_ray = False
        self._marker = secrets.token_hex(8)

    def start(self, begin: Phase) -> None:
        """Start everything; returns when all replicas are ready.

        Raises:
            DiptychError: some replica did not start; carries the end of its traceback.
        """
        self._set_environment()
        begin("import Ray")
        import ray
        from ray import serve

        begin("start Ray")
        self._has_ray = True
        ray.init(
            num_cpus=self._num_processes,
            include_dashboard=False,
            log_to_driver=False,
            logging_level="ERROR",
            object_store_memory=OBJECT_STORE_BYTES,
        )
        children = psutil.Process().children()
        named = [(process.name(), process) for process in children]
        self._daemons = [(name, p) for name, p in named if name in ("raylet", "gcs_server")]
        logging.getLogger("ray.serve").setLevel(logging.ERROR)
        begin("start Serve")
        serve.start(proxy_location="Disabled", logging_config=_logging())
        begin("start workers and load the model")
        try:
            serve.run(self._application(), name=APPLICATION, route_prefix=None)
        except RuntimeError as error:
            raise DiptychError(_start_failure(str(error))) from None

    def failure(self) -> str | None:
        """Why the cluster cannot go on, if so: a daemon of Ray has ended."""
        gone = [name for name, process in self._daemons if not _runs(process)]
        return f"{', '.join(gone)} ended" if gone else None

    def stop(self) -> None:
        """Stop the application, then Ray, then whatever is left of its processes."""
        if not self._has_ray:
            return
        processes = self._processes()
        # a thread, since Serve waits without a limit when its controller is already gone
        stopper = threading.Thread(target=_stop_serve, daemon=True, name="stop serve")
        stopper.start()
        stopper.join(self._config.shutdown_grace_s + STOP_SERVE_S)
        import ray

        ray.shutdown()
        _, alive = psutil.wait_procs(processes, timeout=STOP_PROCESS_S)
        for process in alive:
            process.kill()
        psutil.wait_procs(alive, timeout=STOP_PROCESS_S)

    def _processes(self) -> list[psutil.Process]:
        """Everything Ray started for us, orphans of a dead raylet included."""
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if process.environ().get(_MARKER) == self._marker:
                    found.append(process)
        return found

    @property
    def _num_processes(self) -> int:
        """Ray starts as many worker processes ahead; Serve's controller is one of them."""
        return self._config.num_workers + self._config.http.replicas + 1

    def _set_environment(self) -> None:
        threads = max(self._config.prefill_threads, self._config.decode_threads)
        os.environ.update(_RAY_ENVIRONMENT)
        os.environ["OMP_NUM_THREADS"] = str(threads)
        os.environ[_MARKER] = self._marker
        os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

    def _application(self) -> Any:  # noqa: ANN401  # a Serve Application
        from decode.worker import DecodeWorker
        from prefill.worker import PrefillWorker

        pools = {}
        if self._config.prefill_replicas:
            pools[Role.PREFILL.value] = self._pool(PrefillWorker, Role.PREFILL)
        pools[Role.DECODE.value] = self._pool(DecodeWorker, Role.DECODE)
        ingress = self._deployment(IngressReplica, "ingress", self._config.http.replicas)
        return ingress.bind(self._config, self._folder, self._secret, pools)

    def _pool(self, worker: type, role: Role) -> Any:  # noqa: ANN401  # a Serve Application
        config = self._config
        is_prefill = role is Role.PREFILL
        replicas = config.prefill_replicas if is_prefill else config.decode_replicas
        threads = config.prefill_threads if is_prefill else config.decode_threads
        options: dict[str, Any] = {"request_router_config": self._choice(role)}
        if str(threads) != os.environ["OMP_NUM_THREADS"]:
            variables = {"OMP_NUM_THREADS": str(threads)}
            options["ray_actor_options"] = {
                "num_cpus": 0,
                "runtime_env": {"env_vars": variables},
            }
        deployment = self._deployment(worker, role.value, replicas, **options)
        return deployment.bind(config, self._folder, self._secret)

    @staticmethod
    def _choice(role: Role) -> Any:  # noqa: ANN401  # a Serve RequestRouterConfig
        from ray.serve.config import RequestRouterConfig

        return RequestRouterConfig(
            request_router_class="router.replica_choice:TargetOrRefuse",
            request_router_kwargs={"role": role.value},
        )

    def _deployment(self, target: type, name: str, replicas: int, **options: Any) -> Any:  # noqa: ANN401
        from ray import serve

        settings: dict[str, Any] = {
            "name": name,
            "num_replicas": replicas,
            "max_ongoing_requests": MAX_ONGOING,
            "health_check_period_s": 1.0,
            "health_check_timeout_s": 10.0,
            "graceful_shutdown_wait_loop_s": 0.1,
            "graceful_shutdown_timeout_s": self._config.shutdown_grace_s,
            "max_constructor_retry_count": 1,
            "ray_actor_options": {"num_cpus": 0},
            "logging_config": _logging(),
        }
        return serve.deployment(target, **(settings | options))


def _logging() -> Any:  # noqa: ANN401  # a Serve LoggingConfig
    from ray.serve.schema import LoggingConfig

    return LoggingConfig(log_level="WARNING", enable_access_log=False)


def _runs(process: psutil.Process) -> bool:
    """Whether a child of ours still works; an ended one stays a zombie until it is waited for."""
    return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)


def _stop_serve() -> None:
    from ray import serve

    try:
        serve.shutdown()
    except Exception:  # task root; ray.shutdown ends what is left
        log.exception("Serve did not shut down")


def _start_failure(fallback: str) -> str:
    """What a user needs of Serve's report: the last lines of the worker's own traceback."""
    from ray import serve

    application = serve.status().applications.get(APPLICATION)
    deployments = application.deployments if application else {}
    reports = [
        f"{name}: {_tail(deployment.message)}"
        for name, deployment in deployments.items()
        if deployment.status == "DEPLOY_FAILED"
    ]
    return "a worker did not start\n" + "\n".join(reports or [fallback])


def _tail(report: str) -> str:
    """The sentence of an error of ours; of any other error the end of its traceback."""
    lines = [line for line in report.splitlines() if line.strip()]
    if lines and lines[-1].startswith("cluster.errors."):
        return lines[-1].partition(": ")[2]
    return "\n".join(lines[-TRACEBACK_LINES:])
