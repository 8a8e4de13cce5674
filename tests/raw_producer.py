"""A producer that speaks the service's messages directly, and may say anything."""

import pyarrow.flight as flight
import pytest
from services import frame

from penstock.io.flight.messages import PutRequest, Words, decoded

ROWS = 8000  # 192 kB
FRAMES = [frame(n, ROWS) for n in range(12)]


class Raw:
    """A producer of our own making: it says what it likes."""

    def __init__(self, service, memory=True, schema=FRAMES[0].schema):
        self._client = flight.connect(service.address.uri)
        request = PutRequest(contributor="w0", first=1, ends=True, memory=memory)
        self.writer, self.reader = self._client.do_put(request.descriptor(), schema)
        self.offer = self.heard("memory") if memory else None

    def heard(self, word):
        while (said := self.reader.read()) is not None:
            if word in (found := decoded(said, "")):
                return found[word]
        return None

    def say(self, **words):
        self.writer.write_metadata(Words(**words).encoded())

    def refused(self):
        """The line that the stream ended with."""
        self.writer.done_writing()
        while self.reader.read() is not None:
            pass
        with pytest.raises(flight.FlightServerError) as error:
            self.writer.close()
        self._client.close()
        return str(error.value)

    def close(self):
        self.writer.done_writing()
        while self.reader.read() is not None:
            pass
        self.writer.close()
        self._client.close()


def put(raw, room, batch, **words):
    raw.say(place=room.put(room.parcel(batch)), **words)
