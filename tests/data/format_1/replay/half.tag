{
 "penstock.commit": 1,
 "number": 2,
 "files": [
  {
   "name": "00000001.base",
   "num_bytes": 3387,
   "digest": "3a1801b5695d6ccfa3cf516aaac58cb743b0334bb1dbcf8e9204a29554a28c26",
   "parent": null
  },
  {
   "name": "00000002.delta",
   "num_bytes": 4555,
   "digest": "add51dd06d90473d1532e4ba2384c278e26d1393ed158170a32134bb3e7ed5a0",
   "parent": "3a1801b5695d6ccfa3cf516aaac58cb743b0334bb1dbcf8e9204a29554a28c26"
  }
 ],
 "global_step": 6,
 "changed_step": 6,
 "clock_offset": 0,
 "tables": [
  {
   "name": "item",
   "vocabulary_size": 30,
   "dim": 4,
   "optimizer": "Adagrad",
   "slots": [
    "accumulators"
   ],
   "storage_dtype": "float32"
  },
  {
   "name": "user",
   "vocabulary_size": 24,
   "dim": 4,
   "optimizer": "Adam",
   "slots": [
    "momenta",
    "velocities"
   ],
   "storage_dtype": "float32",
   "dynamic": {
    "min_count": 2,
    "count": "rows",
    "forget_after": null,
    "probability": null,
    "expire_after": 6,
    "clock": "steps",
    "evict": "lru",
    "half_life": null,
    "on_full": "error",
    "missing": "initial",
    "key_type": "uint64"
   }
  }
 ],
 "programs": {
  "item": {
   "variant": "host",
   "compiler": "penstock's kernels"
  },
  "user": {
   "variant": "host",
   "compiler": "penstock's kernels"
  }
 },
 "num_required": 3,
 "reduction": "mean",
 "seed": 0,
 "learning_rates": [],
 "positions": {
  "merge": null,
  "sources": [
   [
    "log.arrows",
    19,
    "d93564ae28472e7f833ea7dceb66f652"
   ]
  ],
  "producers": {},
  "tallies": {},
  "creations": {},
  "lineage": null,
  "epochs": null,
  "stale_rows": 0,
  "rows": 247,
  "unchecked": []
 },
 "quarantine": {
  "bytes": 1416,
  "crc": 1382137883,
  "rows": 1
 },
 "deltas": {
  "batches": 6,
  "bytes": 15640,
  "crc": 1583518909,
  "tail": 4267924277,
  "step": 6,
  "name": "replay.deltas.arrows"
 },
 "counters": {
  "rows": 247,
  "frames": 19,
  "stale": 0,
  "steps": 6,
  "held_bytes": 2351,
  "dropped": {
   "id_out_of_range": 1
  },
  "truncated": 0,
  "stale_rows": 0,
  "rolled_back": 0,
  "not_finite": 0,
  "first_not_finite": ""
 },
 "gate": {
  "global_step": 6,
  "num_accumulated": 1,
  "contributors": [
   [
    null,
    1
   ]
  ],
  "stale": {
   "total": 0,
   "by_contributor": [],
   "by_lateness": [],
   "last": null
  }
 },
 "pipeline": {
  "num_admitted": 19,
  "last": [
   18,
   null,
   null
  ]
 },
 "config": "yj5HChgKBGl0ZW0QHhgEKgwaAGoFDc3MzD2IAQEKKQoEdXNlchAYGAQqHTIRHWZmZj8ld75/Py2Vv9YzUAFqBQ3NzMw9iAEBEALSPhQKBHVzZXJCDAgBEgIIAhoCCAYiAA==",
 "python": [],
 "tag": {
  "name": "half",
  "note": "",
  "tagged_s": 1795890798
 }
}
5307ba27b2d86b70825e5cca65b7a824fbd74365317e90fbcdf9b221b8112e1b
