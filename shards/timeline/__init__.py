"""The timeline of a source: which picture is on show at time t, and its shape. Only this package interprets times.

Time 0 is the start of the container, as in players: the earliest timestamp of its tracks. A frame is on show from its
timestamp until the next frame begins; the last frame lasts as long as its packet states. Three parts of the project use
the timeline: the probe, which reads every packet once (or the index of an MP4); readers of frames (`shown_frames`); and
the encoder, whose ffmpeg gets the timestamps of the file and never corrects them.

A timeline is *continuous* if it equals the file's timestamps minus `start`. Otherwise, the packets get corrected
timestamps (`timed_packets`): if timestamps start again, the parts follow one another, and frames without timestamps
(AVI) are shown one after another in presentation order. ffmpeg reads a copy of such a source with these timestamps
(`write_continuous`); the copy is not encoded again.

The shape of a picture is its crop, its orientation and the width of its pixels. Crop and orientation come from the
container; the width may change within the stream. libav is loaded by the first function that opens a source.
"""
