"""A store of objects in memory, as a file system of pyarrow, that records the requests for ranges of its objects."""

import io

import pyarrow as pa
import pyarrow.fs


class _Object(io.RawIOBase):
    """An open object. A read is a request."""

    def __init__(self, store, path):
        super().__init__()
        self._store, self._path, self._position = store, path, 0
        self._size = len(store.objects[path])

    def readable(self):
        return True

    def seekable(self):
        return True

    def tell(self):
        return self._position

    def seek(self, offset, whence=0):
        self._position = offset + (0, self._position, self._size)[whence]
        return self._position

    def read(self, num_bytes=-1):
        data = self._store.request(self._path, self._position, num_bytes)
        self._position += len(data)
        return data


class ObjectStore(pa.fs.FileSystemHandler):
    """objects : path → bytes, which a test may replace; requests : (offset, bytes) of each, in order

    before_request : called with the number of earlier requests, and may wait or raise
    """

    def __init__(self, objects, before_request=lambda number: None):
        self.objects, self.before_request, self.requests = objects, before_request, []

    def request(self, path, offset, num_bytes):
        number = len(self.requests)
        self.requests.append((offset, num_bytes))
        self.before_request(number)
        return self.objects[path][offset : offset + num_bytes]

    def use(self, monkeypatch):
        """Let every URI name an object: ``store://PATH``."""
        fs = pa.fs.PyFileSystem(self)
        of_path = lambda text: (fs, text.removeprefix("store://"))  # noqa: E731
        monkeypatch.setattr("penstock.io.sources.opening.filesystem_of", of_path)

    # ---- of pyarrow's handler

    def get_file_info(self, paths):
        return [self._info(path) for path in paths]

    def _info(self, path):
        if path in self.objects:
            return pa.fs.FileInfo(path, pa.fs.FileType.File, size=len(self.objects[path]))
        is_folder = any(each.startswith(f"{path}/") for each in self.objects)
        return pa.fs.FileInfo(path, pa.fs.FileType.Directory if is_folder else pa.fs.FileType.NotFound)

    def get_file_info_selector(self, selector):
        return [self._info(path) for path in self.objects if path.startswith(f"{selector.base_dir}/")]

    def open_input_file(self, path):
        return pa.PythonFile(_Object(self, path), mode="r")

    def get_type_name(self):
        return "store"

    def normalize_path(self, path):
        return path

    def _refuse(self, *_):
        raise NotImplementedError

    open_input_stream = open_output_stream = open_append_stream = copy_file = create_dir = delete_dir = _refuse
    delete_dir_contents = delete_file = delete_root_dir_contents = move = _refuse
