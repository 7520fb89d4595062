"""What a weight log holds, in numbers, for `temper status`. Pure; called by ``weight_desk`` in the thread of the disk."""

from __future__ import annotations

from temper.broker.weight_log import WeightLog
from temper.common.reports import WeightsStatus


def outline(log: WeightLog) -> WeightsStatus:
    """The newest version, the way of a newcomer to it, and what lies on the disk."""
    newest = log.newest()
    if newest is None:
        return WeightsStatus()
    way = [log_file.footer.manifest for log_file in log.way(None) or ()]
    files = log.places[newest.ordinal].files()
    last = files[-1].footer.manifest  # the delta, where there is one
    deltas = [manifest for manifest in way if manifest.base is not None]
    return WeightsStatus(
        ordinal=newest.ordinal,
        lineage=newest.lineage,
        digest=newest.digest,
        versions=len(log.places),
        snapshot=way[0].version.ordinal if way else None,
        snapshot_bytes=way[0].size if way else 0,
        deltas=len(deltas),
        delta_bytes=sum(manifest.size for manifest in deltas),
        full_bytes=way[-1].full_size if way else 0,
        newest_bytes=last.size,
        newest_density=last.density,
        disk_bytes=sum(log_file.footer.manifest.size for log_file in log.files()),
    )
