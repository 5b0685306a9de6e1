from pathlib import Path
from localcluster.components import Component
from localcluster.progress import Steps
from localcluster.settings import Layout, Settings


def up(settings: Settings, layout: Layout, programs: Path, steps: Steps) -> None:
    raise NotImplementedError


def expected(settings: Settings, layout: Layout, programs: Path) -> list[Component]:
    return []
