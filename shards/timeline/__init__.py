"""The timeline of a source: which frame is displayed at time t, and the shape of the frame.

No other part of the project interprets timestamps. Time 0 is the start of the container, as in players: the earliest
timestamp of its tracks. A frame is displayed from its timestamp until the next frame begins; the last frame lasts as
long as its packet states. Three parts of the project use the timeline: the probe, which reads every packet once (or the
index of an MP4); readers of frames (`displayed_frames`); and the encoder, whose ffmpeg process uses the timestamps of
the file without correction.

A timeline is *continuous* if it equals the timestamps of the file minus `start`. Otherwise, the packets get corrected
timestamps (`read_timeline`): if timestamps restart, the parts follow one another, and frames without timestamps (AVI)
are displayed one after another in presentation order. ffmpeg then reads a copy of the source with these timestamps,
which is made without re-encoding (`write_continuous`).

The shape of a frame consists of its crop, its orientation, and the aspect ratio of its pixels. Crop and orientation are
stored in the container; the aspect ratio may change within the stream. libav is loaded by the first function that opens
a source.
"""
