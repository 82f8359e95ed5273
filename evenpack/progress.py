"""How far long work is, for a terminal or a log file."""

import math


def format_rate(per_second: float | None) -> str:
    """Three significant digits with k, M or G: '812', '45.3k', '1.20M'; '-' if unknown."""
    if per_second is None or not math.isfinite(per_second):
        return "-"
    scaled, unit = per_second, ""
    for larger in ("k", "M", "G"):
        if scaled < 999.5:
            break
        scaled, unit = scaled / 1000, larger
    digits = 0 if not unit or scaled >= 99.95 else 1 if scaled >= 9.995 else 2
    return f"{scaled:.{digits}f}{unit}"


def format_duration(seconds: float | None) -> str:
    """'45s', '12m30s', '3h05m', '2d04h'; '-' if unknown."""
    if seconds is None or not math.isfinite(seconds):
        return "-"
    whole = round(seconds)
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02d}s"
    if whole < 86400:
        return f"{whole // 3600}h{whole % 3600 // 60:02d}m"
    return f"{whole // 86400}d{whole % 86400 // 3600:02d}h"
