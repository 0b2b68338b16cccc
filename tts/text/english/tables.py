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
    | √=square root of | μ=mu | §=section | ∈=in | ∉=not in | ∑=sum of | ∏=product of
    | ∫=integral of | ∂=partial | ∀=for all | ∃=there exists | ∪=union | ∩=intersection
    | ⊂=is a subset of | ∝=is proportional to | ₩=won | ₽=rubles | ₺=lira | ₪=shekels
    | ₦=naira | ₴=hryvnias | ₫=dong | ₱=pesos | ฿=baht | ₿=bitcoins"""
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
    | kcal=kilocalorie | cal=calorie | ha=hectare | sq ft=square foot | sq mi=square mile
    | sq m=square meter | sq km=square kilometer | tsp=teaspoon | tbsp=tablespoon | gal=gallon
    | qt=quart | pt=pint | fl oz=fluid ounce | cc=cubic centimeter | cl=centiliter | dl=deciliter
    | dL=deciliter | mpg=mile per gallon | kn=knot | bpm=beat per minute | psi=pound per square inch
    | ppm=part per million | ppb=part per billion | Pa=pascal | hPa=hectopascal | kPa=kilopascal
    | MPa=megapascal | N=newton | kN=kilonewton | Nm=newton meter | J=joule | kJ=kilojoule
    | MJ=megajoule | Wh=watt hour | MWh=megawatt hour | GWh=gigawatt hour | GW=gigawatt
    | mW=milliwatt | mV=millivolt | kV=kilovolt | mAh=milliampere hour | Ah=ampere hour
    | mol=mole | lm=lumen | lx=lux | kt=kiloton | KiB=kibibyte | MiB=mebibyte | GiB=gibibyte
    | TiB=tebibyte | PB=petabyte | Kbps=kilobit per second | THz=terahertz | kPh=kilometer per hour
    | kmh=kilometer per hour | yr=year | yrs=year | wk=week | wks=week | KG=kilogram
    | mbps=megabit per second | gbps=gigabit per second"""
)
ATTACHED_UNITS = _words("in h s A cal pt")  # after a space these are words or letters
IRREGULAR_UNITS = _pairs("foot=feet | inch=inches | square foot=square feet | lux=lux")
PER_UNITS = _pairs(
    """h=hour | hr=hour | s=second | sec=second | min=minute | day=day | d=day | week=week | wk=week
    | month=month | mo=month | year=year | yr=year | kg=kilogram | L=liter | l=liter
    | mL=milliliter | dL=deciliter | m=meter | km=kilometer | lb=pound | gal=gallon | mol=mole
    | mi=mile"""
)

TITLES = _pairs(
    """mr=Mister | mrs=Missus | ms=Miz | dr=Doctor | prof=Professor | gen=General | col=Colonel
    | capt=Captain | lt=Lieutenant | sgt=Sergeant | rev=Reverend | hon=Honorable | gov=Governor
    | sen=Senator | rep=Representative | pres=President | mt=Mount | fr=Father
    | ft=Fort | adm=Admiral | maj=Major | cmdr=Commander | cpl=Corporal | atty=Attorney
    | supt=Superintendent | amb=Ambassador | messrs=Messieurs"""
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
    | govt=government | terr=Terrace | ln=Lane | hwy=Highway | pkwy=Parkway | expy=Expressway
    | bldg=Building | apt=Apartment | intl=International | natl=National | mgr=Manager"""
)
"""Abbreviations, read so before a dot, that can also end a sentence."""

MONTH_DOTS = {name[:3].lower(): name for name in MONTHS if name != "May"} | {"sept": "September"}
WEEKDAYS = _pairs(
    """mon=Monday | tue=Tuesday | tues=Tuesday | wed=Wednesday | thu=Thursday | thur=Thursday
    | thurs=Thursday | fri=Friday | sat=Saturday | sun=Sunday"""
)

SPELLED = frozenset(
    _words(
        """AI API ATM CEO CIA CIO COO CTO CFO DIY EU FAQ FBI GPU CPU UI UX ID IO IP IQ IRS ISO IT
        MIT IBM NYC UAE UCLA UFO UK UN URL URI UUID USA USB USD US VIP HIV IOS OS PM AM AC DC EV PHD
        AWS GUI IDE SUV ETA OS NBA EPA FDA FAA ICU IPO LA TV EUR UTC GMT ESP UV OCR EEG MRI EKG ECG
        ADHD AKA ROI CNN BBC NBC ABC CBS HBO AOL AD BCE CE EST EDT CET CEST MBA BA MA DNA RNA RAF
        RSVP DEA ATF TSA NSA USDA USPS UPS USSR WTO IMF OECD ECB IAEA ACLU NAACP AMA ABA IRA EMT ER
        ESPN MTV UFC MLS AMC RCA BMI BMW DUI FYI IOU OMG IDK IMO TBA POV EOD OOO DOB DOA DOJ DOE DOD
        SOS OCD LED OLED ISP ISBN ISSN EAN UPC IMEI IATA OOP OTC IVF IV IBS ALS UTI ETF APR APY HOA
        EVP USC NYU LSE UCSD UCSF UAV IUD ICBM RPG AED AAA ASMR CEE EEA EEC UCI UEA NRA AFC AOC API
        IKR IEEE IEC IETF IRC ACL AES RSA SSD USAF ACA GPA ESL SEO CRO IRL ASL AAU AFL
        CIO GOP DNC LAX SFO ORD IAD ATL EWR OSL IAH MIA YYZ AMS"""
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
STATES = _pairs(
    """AL=Alabama | AK=Alaska | AZ=Arizona | AR=Arkansas | CA=California | CO=Colorado
    | CT=Connecticut | DE=Delaware | FL=Florida | GA=Georgia | HI=Hawaii | ID=Idaho | IL=Illinois
    | IN=Indiana | IA=Iowa | KS=Kansas | KY=Kentucky | LA=Louisiana | ME=Maine | MD=Maryland
    | MA=Massachusetts | MI=Michigan | MN=Minnesota | MS=Mississippi | MO=Missouri | MT=Montana
    | NE=Nebraska | NV=Nevada | NH=New Hampshire | NJ=New Jersey | NM=New Mexico | NY=New York
    | NC=North Carolina | ND=North Dakota | OH=Ohio | OK=Oklahoma | OR=Oregon | PA=Pennsylvania
    | RI=Rhode Island | SC=South Carolina | SD=South Dakota | TN=Tennessee | TX=Texas | UT=Utah
    | VT=Vermont | VA=Virginia | WA=Washington | WV=West Virginia | WI=Wisconsin | WY=Wyoming
    | DC=D C"""
)
STREETS = _pairs(
    """dr=Drive | ct=Court | pl=Place | sq=Square | cir=Circle | ln=Lane | terr=Terrace
    | ave=Avenue | rd=Road | blvd=Boulevard | hwy=Highway | pkwy=Parkway | expy=Expressway"""
)
"""Abbreviations after the name of a street."""

DIRECTIONS = _pairs("N=North | S=South | E=East | W=West")
AIRLINES = _words(
    """AA AC AF AS AY AZ BA B6 CA CX CZ DL EI EK ET EY FR HA IB JL KE KL KLM LH LX MH MS MU NH NZ OS
    QF QR SA SK SN SQ SU SV TG TK TP UA VA VS WN WS WY"""
)
"""Codes of airlines, before the number of a flight."""

BIBLE = _pairs(
    """Gen=Genesis | Ex=Exodus | Exod=Exodus | Lev=Leviticus | Num=Numbers | Deut=Deuteronomy
    | Josh=Joshua | Judg=Judges | Sam=Samuel | Ps=Psalms | Prov=Proverbs | Eccl=Ecclesiastes
    | Isa=Isaiah | Jer=Jeremiah | Ezek=Ezekiel | Dan=Daniel | Matt=Matthew | Mk=Mark | Lk=Luke
    | Jn=John | Rom=Romans | Cor=Corinthians | Gal=Galatians | Eph=Ephesians | Phil=Philippians
    | Col=Colossians | Thess=Thessalonians | Tim=Timothy | Heb=Hebrews | Jas=James | Pet=Peter
    | Rev=Revelation"""
)
"""Books of the Bible, before chapter and verse."""

LABELS = _pairs("ch=chapter | chap=chapter | rm=room | sec=section | ex=example | ver=version")
"""Abbreviations before a number."""

BEFORE_DIGITS = frozenset(
    (*_words("no max min ste ext"), *LABELS, *MONTH_DOTS, *(name.lower() for name in BIBLE))
)
"""Abbreviations that end a sentence unless a number follows."""

DOMAINS = _words(
    """com org net edu gov mil int io ai co dev app info biz me tv uk de fr eu us ca au ch nl"""
)
SPELLED_DOMAINS = frozenset(_words("io ai tv uk de fr eu us ca au ch nl"))
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

LEANING = frozenset(
    _words(
        """a an the my your his her its our their this that these those some any every each of to in
        on at by for from with without into onto about over under between and or but if as than
        because when while is are was were am be been being has have had will would can could shall
        should may might must do does did not no never very so too quite more most i you he she it
        we they who which what whose how where there let's i'm you're he's she's it's we're they're
        don't doesn't didn't can't won't"""
    )
)
"""Words after which a speaker does not pause."""

NUMBER_WORDS = frozenset(
    _words(
        """zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen
        fifteen sixteen seventeen eighteen nineteen twenty thirty forty fifty sixty seventy eighty
        ninety hundred thousand million billion trillion half quarter point"""
    )
)
"""Words of which numbers are written."""
