"""The timeline of a source: which picture is on show at time t, and in which shape. Only this package interprets times.

Time 0 is the start of the container, as in players: the earliest timestamp of its tracks. A frame is on show from its
timestamp until the next frame begins; the last frame lasts as long as its packet states. The timeline has three
readers: the probe, which reads every packet once (or the index of an MP4), readers of frames (`shown_frames`), and the
encoder, whose ffmpeg gets the timestamps of the file and never corrects them.

A timeline is *continuous* if the file's timestamps, minus `start`, are the timeline. Otherwise its packets get other
timestamps (`timed_packets`): parts whose timestamps start again follow one another, and frames without timestamps
(AVI) are shown one after another in presentation order. ffmpeg gets such a source as a copy with these timestamps
(`write_continuous`), which is not encoded again.

The shape of a picture is its crop and its orientation, both of the container, and the width of its pixels, which may
change within the stream. libav is loaded by the first function that opens a source.
"""
