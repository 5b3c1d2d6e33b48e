"""Allowlists of container formats and protocols for opening videos.

libav guesses the format from the first bytes, whatever the file name, and many of its formats open other resources:
playlists (HLS, DASH, concat scripts) read local files and URLs, and session descriptions (SDP) wait for network
packets. Every call that opens a video therefore passes the formats and the protocols that it allows.
"""

# Format names of libav, for its option `format_whitelist`.
CONTAINERS = "mov,matroska,avi,mpegts,mpeg,flv,asf,ogg,mpegvideo,ivf,gif,mxf,wtv,rm,dv"
# For libav's option `protocol_whitelist`.
FILE_PROTOCOLS = "file,pipe"
NO_PROTOCOLS = ""  # for a video in memory
