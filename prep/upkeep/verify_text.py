"""What `prep verify` says to people."""

from pathlib import Path

from manifests.errors import UserError
from prep.core.data_folder import TEXT, VIDEO
from prep.upkeep.recipe_text import command_for, command_of
from prep.upkeep.records import RecordFinding
from prep.upkeep.status_text import size_text
from prep.upkeep.verify import Verified
from shards.commits import commit_path
from shards.reader import Variant


def verified_text(found: Verified, *, column: str, max_findings: int) -> str:
    """The findings, one a line, and what was checked."""
    listed = [*found.findings, *found.deep_findings]
    lines = [
        f"shard {finding.shard_id:06d}  {finding.code}  {finding.key or '-'}  {finding.message}"
        for finding in listed[:max_findings]
    ]
    if len(listed) > max_findings:
        lines.append(f"... and {len(listed) - max_findings} more; --json lists all")
    frames = "frames" if column == VIDEO else "rows"
    looked = "decoded" if column == VIDEO else "looked at"
    decoded = f", {found.num_deep} {frames} {looked}" if found.num_deep else ""
    lines.append(
        f"{column} {found.variant}: {found.num_samples} {'videos' if column == TEXT else 'chunks'}"
        f" in {found.num_shards} shards,"
        f" {size_text(found.num_bytes)} read{decoded}: {'damaged' if found.num_problems else 'all right'}"
    )
    return "\n".join(lines)


def records_text(records: list[RecordFinding]) -> list[str]:
    """One line for each damaged record."""
    return [
        f"record  {record.message}" if record.path in record.message else f"record  {record.path}: {record.message}"
        for record in records
    ]


def repairs_text(records: list[RecordFinding]) -> list[str]:
    """What repairs the damaged records, each command once."""
    if not records:
        return []
    commands = dict.fromkeys(record.repair for record in records)
    return [f"{_count(len(records), 'damaged record')}; repaired by: {'; '.join(commands)}"]


def failure_text(found: Verified, variant: Variant, *, column: str, data_dir: Path) -> str:
    """How much is wrong, and what mends it."""
    num_shards = len({finding.shard_id for finding in (*found.findings, *found.deep_findings)})
    parts = [f"{_count(found.num_problems, 'problem')} in {_count(num_shards, 'shard')} of {variant.directory.name}"]
    if found.findings:
        try:
            command = command_of(column, variant.recipe, data_dir=data_dir)
        except UserError:
            command = f"prep {command_for(column)} with the variant's settings"
        parts.append(f"made again by: {command}")
    # What a run passes over has to be taken out of its sight by hand.
    by_hand = sorted({*found.unseen, *(finding.shard_id for finding in found.deep_findings)})
    if by_hand:
        paths = ", ".join(str(commit_path(variant.directory, shard_id)) for shard_id in by_hand[:5])
        more = f" and {len(by_hand) - 5} more" if len(by_hand) > 5 else ""
        why = (
            "that could not be marked, or whose bytes are as committed"
            if found.unseen
            else "whose bytes are as committed"
        )
        parts.append(f"shards {why} are made again only when their commit is removed first: {paths}{more}")
    return "; ".join(parts)


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
