"""A figure that a notebook shows, also without pyplot. It needs matplotlib."""

from io import BytesIO

from matplotlib.figure import Figure


class ShownFigure(Figure):
    """A figure of matplotlib that a notebook shows if it is the last value of a cell."""

    def _repr_png_(self) -> bytes:
        picture = BytesIO()
        self.savefig(picture, format="png", dpi=100)
        return picture.getvalue()
