"""The worker: code of a job's own process, under any Python from 3.10 on, with numpy and one backend's library."""
