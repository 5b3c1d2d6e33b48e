"""Which files are opened as videos: those of containers that hold their pictures themselves.

libav guesses a format by the first bytes, whatever a file is called, and many of its formats open other things:
playlists (HLS, DASH, concat scripts) read local files and addresses, session descriptions (SDP) wait for packets of the
network. Whoever opens a video says which formats it may be, and through which protocols anything may be opened.
"""

# libav's names, for its option `format_whitelist`.
CONTAINERS = "mov,matroska,avi,mpegts,mpeg,flv,asf,ogg,mpegvideo,ivf,gif,mxf,wtv,rm"
# For its option `protocol_whitelist`.
FILE_PROTOCOLS = "file,pipe"
NO_PROTOCOLS = ""  # of a video in memory
