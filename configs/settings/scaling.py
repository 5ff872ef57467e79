"""Settings of the autoscaling policy `ScaleTogether`."""

from pydantic import Field, model_validator

from configs.settings.base import Frozen, Seconds


class ScalingSettings(Frozen):
    """Arguments (`policy_kwargs`) of `ScaleTogether`, the policy that scales both roles.

    They are under `autoscaling_policy`, a key beside `args`.
    """

    prefill_busy: float = Field(
        0.7,
        gt=0,
        le=1,
        description="target fraction of time in which prefill engines compute prompts, estimated from their measured "
        "prompt tokens per busy second",
    )
    catch_up_s: Seconds = Field(10.0, description="time in which queued prompt tokens should be computed")
    kv_use: float = Field(0.7, gt=0, le=1, description="target fraction of decode engines' KV cache in use")
    tpot_s: Seconds | None = Field(
        None,
        description="target for the mean time per output token on decode engines; set it well below your latency "
        "objective. Unset: only the KV cache counts",
    )
    slack: float = Field(
        0.15,
        ge=0,
        lt=1,
        description="an engine is removed if the others could serve a load larger by this fraction",
    )
    fewest_prefill_per_decode: float = Field(
        0.25,
        gt=0,
        allow_inf_nan=False,
        description="minimum number of prefill engines per decode engine; below it prefill engines are added, or "
        "decode engines removed at `max_replicas`. Bounds of `replicas` take precedence",
    )
    most_prefill_per_decode: float = Field(
        4.0,
        gt=0,
        allow_inf_nan=False,
        description="maximum number of prefill engines per decode engine; above it decode engines are added, or "
        "prefill engines removed at `max_replicas`",
    )

    @model_validator(mode="after")
    def _ratio_leaves_room(self) -> "ScalingSettings":
        if self.most_prefill_per_decode < self.fewest_prefill_per_decode:
            raise ValueError("most_prefill_per_decode must not be below fewest_prefill_per_decode")
        return self
