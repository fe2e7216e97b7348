"""twostep on Ray Serve: `serve run deploy.ray:app`, with arguments as `min_replicas=2`; or `serve deploy` and a file
like `deploy/ray/config.yaml`. docs/scale.md tells of it."""

import secrets
from typing import Any

from ray import serve
from ray.serve.config import AutoscalingConfig, AutoscalingPolicy, RequestRouterConfig

from deploy.ray.gateway import Gateway
from deploy.ray.replica import Replica
from deploy.ray.roles import Role
from deploy.ray.settings import ClusterSettings


def app(settings: ClusterSettings) -> serve.Application:
    """Returns the application: gateways, which speak HTTP, in front of replicas, each of which runs a server; and, if
    there are to be any, of prefill replicas, which the others reach through the gateways."""
    role, prefills, prefill_key = Role(), None, ""
    if settings.max_prefill_replicas:
        prefill_key = secrets.token_urlsafe(32)
        role = Role.decode(settings.gateway_url, prefill_key)
        bounds = (settings.min_prefill_replicas, settings.max_prefill_replicas)
        prefills = _replicas(settings, "Prefill", Role.prefill(prefill_key), *bounds)
    replicas = _replicas(settings, "Replica", role, settings.min_replicas, settings.max_replicas)
    gateways = serve.deployment(
        Gateway,
        name="Gateway",
        num_replicas=settings.num_gateways,
        max_ongoing_requests=settings.max_ongoing_requests,
        graceful_shutdown_timeout_s=settings.drain_s,
        health_check_timeout_s=60.0,
        ray_actor_options={"num_cpus": 0},
    )
    return gateways.bind(replicas, settings.max_body_bytes, settings.replica_wait_s, prefills, prefill_key)


def _replicas(settings: ClusterSettings, name: str, role: Role, minimum: int, maximum: int) -> Any:
    """Returns a deployment of servers, as many as their own load asks for."""
    return serve.deployment(
        Replica,
        name=name,
        max_ongoing_requests=settings.max_ongoing_requests,
        graceful_shutdown_timeout_s=settings.drain_s,
        health_check_period_s=2.0,
        health_check_timeout_s=60.0,
        ray_actor_options={"num_cpus": settings.num_cpus, "num_gpus": settings.num_gpus},
        request_router_config=RequestRouterConfig(
            request_router_class="deploy.ray.request_router:PolicyRequestRouter",
            request_router_kwargs={"policy": settings.routing, "record": settings.routing_record},
            request_routing_stats_period_s=settings.report_s,
        ),
        autoscaling_config=AutoscalingConfig(
            min_replicas=minimum,
            max_replicas=maximum,
            upscale_delay_s=settings.upscale_s,
            downscale_delay_s=settings.downscale_s,
            look_back_period_s=settings.look_back_s,
            policy=AutoscalingPolicy(
                policy_function="deploy.ray.autoscaling:ByWaitingTokens",
                policy_kwargs={
                    "waiting_tokens": settings.waiting_tokens_per_replica,
                    "sequences": settings.sequences_per_replica,
                },
            ),
        ),
    ).bind(list(settings.arguments), role)
