"""Words that the tokenizer of the Penn Treebank knows by name: abbreviations, and words that are two.

A string of words with a space between two stands for the list of them.
"""

# These keep their full stop. A sentence may end with those of the first group, but not with those of the second,
# which matters where a letter follows at once: "etc.x" is two tokens, "mr.x" one.
ABBREVIATIONS_AT_ENDS = (
    "al ala apr ariz assn aug bancorp bhd bldg blvd bros calif co colo conn corp cos ct dak dec esq est etc ext feb "
    "fla fri ga inc ind intl jan jr jul jun kan kans ky ltd mar md mich minn mo mon mont neb nev nov oct okla penn "
    "plc rd rt sep sept seq sq sr sys tel tenn thu thurs tue tues univ va vt wed wis wisc wyo"
)
ABBREVIATIONS_BEFORE_NAMES = (
    "adj adm adv alex assoc asst atty attys ave brig capt cf cie cmdr col comdr cpl dept det dr drs elec ens ft gen "
    "gov govs hon insp invt jos lieut lt maj messrs mlle mme mr mrs ms msgr mt natl pfc ph pres prof profs pvt rep "
    "reps rev sen sens sfc sgt spc st ste supt treas vs wm"
)
# Abbreviations only with a capital, because they are words without: "Mass." and "mass".
ABBREVIATIONS_WITH_CAPITALS = "ark az del ill la mass miss ore pa tex wash"
# Abbreviations only before a number: "no. 5", but "no."
ABBREVIATIONS_BEFORE_NUMBERS = "art ca fig figs no nos op pp prop"

# Two tokens each.
DOUBLE_WORDS = (("can", "not"), ("gim", "me"), ("gon", "na"), ("got", "ta"), ("lem", "me"), ("wan", "na"))

# One token each, in spite of their apostrophe.
WORDS_WITH_APOSTROPHES = "nor'easter c'mon c'est e'er s'mores ev'ry li'l nat'l cap'n"

# With a capital and after a letter with a full stop, they begin a sentence: "the U.S. The man", "option a. He".
SENTENCE_STARTERS = (
    "A About According Additionally After An As At But Earlier He Her Here However If In It Last Many More Mr. Ms. "
    "Now Once One Other Our She Since So Some Such That The Their Then There These They This We When While What Yet You"
)

FILE_ENDINGS = (
    "bat bmp c cgi cpp dll doc docx exe gif gz h htm html jar java jpeg jpg mov mp3 pdf php pl png ppt ps py sql tar "
    "txt wav x xml zip"
)
