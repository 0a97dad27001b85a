"""Figures for Prometheus. A tenant's key shows that tenant's, with the job as a label; an admin's key shows all."""

import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any

from fastapi import APIRouter, Response, Security
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

from marlaas_jax.service.api.route import Api, Caller, KeyRoute, TheApi, bearer
from marlaas_jax.service.fair_share import SHOWN_BOUNDS_S
from marlaas_jax.store import jobs as job_table
from marlaas_jax.store.tenants import Tenant, list_tenants
from marlaas_jax.workers.controller_status import JobStatus

router = APIRouter(tags=["health"], route_class=KeyRoute, dependencies=[Security(bearer)])

MEDIA_TYPE = "text/plain; version=0.0.4; charset=utf-8"
JOB_FIGURES: dict[str, tuple[str, Callable[[JobStatus], float | None]]] = {
    "marlaas_job_step": ("Batches trained.", lambda status: status.step),
    "marlaas_job_reward_mean": ("Mean reward of the last batch.", lambda status: status.reward),
    "marlaas_job_eval_reward_mean": ("Mean reward of the newest evaluation.", lambda status: status.eval_last),
    "marlaas_job_sampled_tokens": ("Tokens sampled since the service started.", lambda status: status.tokens),
    "marlaas_job_sampled_tokens_per_s": ("Tokens sampled per second, lately.", lambda status: status.tokens_per_s),
    "marlaas_job_eta_s": ("Seconds until it has succeeded, as expected now.", lambda status: status.eta_s),
    "marlaas_job_device_share": ("Share of the device in the last second.", lambda status: status.device_share),
}


@router.get("/metrics")
async def metrics(api: TheApi, caller: Caller) -> Response:
    """Returns the figures in Prometheus' text format."""
    names, counts = await api.store.aread(_counts, caller)
    families = [*_jobs(api, caller, names, counts), *_received(api, names), *(_service(api) if caller.is_admin else ())]
    return Response(generate_latest(_registry(families)), media_type=MEDIA_TYPE)


def _counts(connection: Any, caller: Tenant) -> tuple[dict[str, str], dict[str, dict[job_table.JobState, int]]]:
    """Returns the tenants' names and their jobs by state."""
    tenants = list_tenants(connection) if caller.is_admin else [caller]
    counts = {tenant.id: job_table.count_jobs(connection, tenant_id=tenant.id) for tenant in tenants}
    return {tenant.id: tenant.name for tenant in tenants}, counts


def _jobs(
    api: Api, caller: Tenant, names: dict[str, str], counts: dict[str, dict[job_table.JobState, int]]
) -> Iterator[Metric]:
    by_state = GaugeMetricFamily("marlaas_jobs", "Jobs by state.", labels=("tenant", "state"))
    for tenant_id, states in counts.items():
        for state, number in states.items():
            by_state.add_metric((names[tenant_id], state), number)
    yield by_state
    waits: defaultdict[str, float] = defaultdict(float)
    families = {name: GaugeMetricFamily(name, text, labels=("tenant", "job")) for name, (text, _) in JOB_FIGURES.items()}
    for record in api.service.live_jobs(caller):
        tenant = names.get(record.tenant_id, record.tenant_id)
        if record.state == "queued":
            waits[tenant] = max(waits[tenant], time.time() - record.created)
        if (status := api.service.status(record.id)) is not None:
            for name, (_, figure) in JOB_FIGURES.items():
                if (value := figure(status)) is not None:
                    families[name].add_metric((tenant, record.id), value)
    queue = GaugeMetricFamily("marlaas_queue_wait_s", "How long the oldest queued job has been there.", labels=("tenant",))
    for tenant, wait_s in waits.items():
        queue.add_metric((tenant,), wait_s)
    yield queue
    yield from families.values()


def _received(api: Api, names: dict[str, str]) -> Iterator[Metric]:
    """What the tenants waited for and were given; whom the caller may not see is left out."""
    waits = HistogramMetricFamily(
        "marlaas_stage_wait_s", "How long work waited in a stage's queue, since the start.", labels=("tenant", "stage")
    )
    device = CounterMetricFamily("marlaas_device_s", "Seconds of the device, since the start.", labels=("tenant",))
    for tenant_id, received in api.service.fair_share.received().items():
        if (tenant := names.get(tenant_id)) is None:
            continue
        device.add_metric((tenant,), received.device_s)
        for stage, entry in received.waits.items():
            counts = [str(bound) for bound in SHOWN_BOUNDS_S], entry.cumulative(SHOWN_BOUNDS_S)
            buckets = [*zip(*counts, strict=True), ("+Inf", entry.number)]
            waits.add_metric((tenant, stage), buckets, sum_value=entry.sum_s)
    yield waits
    yield device
    tokens = CounterMetricFamily("marlaas_tokens", "Tokens that were billed, since the start.", labels=("tenant", "kind"))
    for (tenant_id, meter), amount in api.service.metering.billed_tokens().items():
        if (tenant := names.get(tenant_id)) is not None:
            tokens.add_metric((tenant, meter.removesuffix("_tokens")), amount)
    yield tokens


def _service(api: Api) -> Iterator[Metric]:
    status = api.service.controller.status()
    share = GaugeMetricFamily("marlaas_device_share", "Share of the device's last second by stage.", labels=("stage",))
    for stage, value in status.device_share.items():
        share.add_metric((stage,), value)
    yield share
    window = api.service.fair_share.window(time.monotonic())
    index = GaugeMetricFamily(
        "marlaas_fairness_jain", "Jain's index of device seconds over weight, of who was backlogged all the last minute."
    )
    if window.jain is not None:
        index.add_metric((), window.jain)
    yield index
    yield GaugeMetricFamily("marlaas_backlogged_tenants", "Tenants that it counts.", len(window.shares))
    yield GaugeMetricFamily("marlaas_bills_unwritten", "Bills that wait for the store.", api.service.metering.num_unwritten)
    device = GaugeMetricFamily("marlaas_device", "What the device's process holds and has done.", labels=("figure",))
    for name, value in status.device_counters.items():
        device.add_metric((name,), value)
    yield device
    lag = GaugeMetricFamily("marlaas_loop_lag_s", "How late the event loop was, last minute.", labels=("quantile",))
    for quantile in (0.5, 0.99, 1.0):
        lag.add_metric((str(quantile),), api.lag.quantile_s(quantile))
    yield lag
    yield GaugeMetricFamily("marlaas_open_streams", "Open event streams.", api.num_streams)
    yield GaugeMetricFamily("marlaas_events_dropped", "Events that could not be kept.", api.service.events.num_dropped)
    yield GaugeMetricFamily("marlaas_store_writes_waiting", "Writes that wait for the store.", api.store.num_waiting_writes)
    yield GaugeMetricFamily("marlaas_compiles_since_warmup", "Programs compiled late.", status.compiles_since_warmup)


def _registry(families: list[Metric]) -> CollectorRegistry:
    class Collected:
        def collect(self) -> list[Metric]:
            return families

        def describe(self) -> list[Metric]:
            return []

    registry = CollectorRegistry()
    registry.register(Collected())
    return registry
