"""Word lists of the text rules: tables of "short=spoken" pairs, and plain lists."""

from __future__ import annotations


def _pairs(text: str) -> dict[str, str]:
    """Return "km=kilometer | cm=centimeter" as a mapping."""
    entries = (entry.split("=") for entry in text.split("|"))
    return {short.strip(): spoken.strip() for short, spoken in entries}


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


SIGN_WORDS = _pairs(
    """£=pounds | €=euros | ¥=yen | ₹=rupees | ¢=cents | °=degrees | ×=times | ÷=divided by
    | ±=plus or minus | ≈=about | ≤=at most | ≥=at least | ≠=is not | ∞=infinity
    | √=square root of | μ=mu | §=section"""
)
"""Signs beyond ASCII that cleaning keeps for the rules, with their names."""

MONTHS = _words(
    """January February March April May June July August September October November December"""
)
DIGITS = _words("zero one two three four five six seven eight nine")

UNITS = _pairs(
    """km=kilometer | cm=centimeter | mm=millimeter | m=meter | mi=mile | μm=micrometer
    | nm=nanometer | ft=foot | yd=yard | in=inch | kg=kilogram | g=gram | mg=milligram
    | μg=microgram | lb=pound | lbs=pound | oz=ounce | L=liter | l=liter | ml=milliliter
    | mL=milliliter | h=hour | hr=hour | hrs=hour | min=minute | mins=minute | s=second
    | sec=second | secs=second | ms=millisecond | μs=microsecond | ns=nanosecond | Hz=hertz
    | kHz=kilohertz | MHz=megahertz | GHz=gigahertz | KB=kilobyte | kB=kilobyte | MB=megabyte
    | GB=gigabyte | TB=terabyte | kbps=kilobit per second | Mbps=megabit per second
    | Gbps=gigabit per second | W=watt | kW=kilowatt | MW=megawatt | kWh=kilowatt hour | V=volt
    | A=ampere | mA=milliampere | mph=mile per hour | kph=kilometer per hour
    | fps=frame per second | rpm=revolution per minute | dB=decibel | px=pixel
    | kcal=kilocalorie | cal=calorie | ha=hectare | sq ft=square foot"""
)
ATTACHED_UNITS = _words("in h s A cal")  # after a space these are words or letters
IRREGULAR_UNITS = _pairs("foot=feet | inch=inches | square foot=square feet")
PER_UNITS = _pairs("h=hour | hr=hour | s=second | sec=second | min=minute | day=day")

TITLES = _pairs(
    """mr=Mister | mrs=Missus | ms=Miz | dr=Doctor | prof=Professor | gen=General | col=Colonel
    | capt=Captain | lt=Lieutenant | sgt=Sergeant | rev=Reverend | hon=Honorable | gov=Governor
    | sen=Senator | rep=Representative | pres=President | mt=Mount | fr=Father"""
)
"""Abbreviations before a name; a sentence does not end after them."""

PHRASES = _pairs(
    """e.g=for example | i.e=that is | eg=for example | ie=that is | vs=versus | cf=compare
    | approx=approximately | fig=figure | figs=figures | vol=volume | pp=pages | ca=circa
    | viz=namely | eq=equation | sect=section"""
)
"""Abbreviations within a sentence; a sentence does not end after them."""

ENDINGS = _pairs(
    """etc=et cetera | inc=Incorporated | ltd=Limited | corp=Corporation | co=Company
    | jr=Junior | sr=Senior | bros=Brothers | dept=department | ave=Avenue | blvd=Boulevard
    | rd=Road | est=established | esq=Esquire | assn=Association | univ=University
    | govt=government"""
)
"""Abbreviations, read so before a dot, that can also end a sentence."""

MONTH_DOTS = {name[:3].lower(): name for name in MONTHS if name != "May"} | {"sept": "September"}
WEEKDAYS = _pairs(
    """mon=Monday | tue=Tuesday | tues=Tuesday | wed=Wednesday | thu=Thursday | thur=Thursday
    | thurs=Thursday | fri=Friday | sat=Saturday | sun=Sunday"""
)

SPELLED = frozenset(
    _words(
        """AI API ATM CEO CIA CIO COO CTO DIY EU FAQ FBI GPU CPU UI UX ID IO IP IQ IRS ISO MIT IBM
        NYC UAE UCLA UFO UK UN URL USA USB USD US VIP HIV IOS PM AC DC EV PHD AWS GUI IDE SUV ETA
        OS NBA EPA FDA FAA ICU IPO LA TV EUR UTC GMT ESP UV OCR EEG MRI EKG ADHD AKA ROI CNN BBC
        NBC ABC CBS HBO AOL"""
    )
)
"""Acronyms with vowels that are spelled letter by letter."""

WORDS_IN_CAPITALS = frozenset(_words("HMM SHH PSST PFFT TSK BRR GRR ZZZ NTH MR MRS DR ST VS MS MT"))
"""Words without a vowel that are not acronyms."""

NUMBERED = _words(
    """Chapter Part Volume Book Act Scene Section Phase Type Class Title Figure Table Article
    Appendix Grade Level Stage Episode War Bowl Mark Apollo Rocky"""
)
REIGNING = _words(
    """Henry Louis George Edward Charles William James Richard Elizabeth Mary Philip Francis John
    Paul Pius Gregory Benedict Leo Clement Innocent Alexander Napoleon Frederick Ferdinand
    Nicholas Peter Catherine Carlos Juan Otto Leopold Victor Albert Umberto Christian Gustav
    Ramses Ptolemy Constantine Urban Boniface Sixtus Julius Adrian Ivan Robert Stephen Felipe"""
)
DOMAINS = _words(
    """com org net edu gov mil int io ai co dev app info biz me tv uk de fr eu us ca au ch nl"""
)
ADDRESS_SIGNS = _pairs(
    """.=dot | /=slash | -=dash | _=underscore | @=at | :=colon | ?=question mark | &=and
    | #=hash | +=plus | %=percent | ~=tilde"""
) | {"=": "equals"}
STARTERS = frozenset(
    _words(
        """The A An He She It They We You I This That These Those There Here In On At But And So If
        When While After Before As For From To With My His Her Its Our Their Your Not No Yes What
        Who Why How Where Which Then Now Also However Still Yet Once Since Until Although Because
        Please Let Do Does Did Is Are Was Were Can Could Will Would Should Have Has Had"""
    )
)
"""Words that start a sentence after "U.S."; other capitalised words do not."""
