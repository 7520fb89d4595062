"""The sandbox worker: executes untrusted programs inside nsjail and returns structured verdicts."""
