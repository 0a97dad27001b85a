"""What use costs, by the service's price list. Pure; amounts are by meter, as the table of usage holds them."""

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import Field

from marlaas_jax.config import Section

MILLION, HOUR_S = 1e6, 3600.0
TOKEN_METERS = ("prompt_tokens", "sampled_tokens", "trained_tokens")
METERS = (*TOKEN_METERS, "device_s", "env_s")

Price = Annotated[float, Field(ge=0, le=1e9)]


class Prices(Section):
    """Prices in one currency; 0 is free."""

    currency: Annotated[str, Field(pattern=r"^[A-Za-z]{1,12}$")] = "USD"
    prompt_tokens: Price = 0.0  # per million tokens, as the next two
    sampled_tokens: Price = 0.0
    trained_tokens: Price = 0.0
    device_hour: Price = 0.0
    env_hour: Price = 0.0

    def cost(self, amounts: Mapping[str, float]) -> float:
        """Returns what the amounts cost; meters without a price are free."""
        tokens = sum(amounts.get(meter, 0.0) * getattr(self, meter) for meter in TOKEN_METERS) / MILLION
        hours = amounts.get("device_s", 0.0) * self.device_hour + amounts.get("env_s", 0.0) * self.env_hour
        return tokens + hours / HOUR_S


def bill(prices: Prices | None, amounts: Mapping[str, float]) -> dict[str, Any]:
    """Returns the amounts of all meters with their cost; None where the service has no price list."""
    meters = {meter: amounts.get(meter, 0.0) for meter in METERS}
    return {
        **meters,
        "cost": None if prices is None else prices.cost(meters),
        "currency": None if prices is None else prices.currency,
    }
