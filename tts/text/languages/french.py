"""French, with the numbers of France."""

from __future__ import annotations

import re

from tts.text.languages.language import (
    FEMININE,
    MASCULINE,
    Language,
    Noun,
    currencies,
    names,
    nouns,
    ordinal_words,
    pairs,
)

_FEMININE = re.compile(
    r".*(?:[cstx]ions?|[eé]ttes?|ences?|ances?|ées?|ies|tés?|ures?|uses?|trices?|esses?|ières?)"
    r"|(?:fois|personne|heure|minute|seconde|semaine|femme|fille|voiture|maison|page|table|ville"
    r"|nuit|main|porte|chaise|chose|ligne|place|pièce|tonne|part|partie|tranche|rue|route|école"
    r"|étoile|équipe|île|livre sterling|lettre|langue|tête|vie|voix|boîte|bouteille|carte|chambre"
    r"|couleur|douzaine|centaine|dizaine|feuille|image|marche|note|œuvre|plante|pomme|question"
    r"|salle|sœur|tasse|vache|victime|mère|fenêtre|fleur|tour|mille)s?"
)
_MASCULINE = re.compile(
    r"(?:musée|lycée|trophée|silence|côté|été|comité|traité|degré|pâté|incendie|génie|parapluie"
    r"|tour|mille)s?"
)


def _gender_of(noun: str) -> str:
    is_feminine = _FEMININE.fullmatch(noun) and not _MASCULINE.fullmatch(noun)
    return FEMININE if is_feminine else MASCULINE


def _agree(words: str, gender: str, noun: str) -> str:
    """Return a number in front of a noun: "une", "vingt et une"."""
    return re.sub(r"\bun$", "une", words) if gender == FEMININE else words


def _ordinal(value: int, ending: str, before: str, behind: str) -> str:
    if value == 1:
        return "première" if ending in ("re", "ère", "res", "ères") else "premier"
    if value == 2 and ending in ("nd", "nde", "nds", "ndes"):
        return "seconde" if "e" in ending else "second"
    return ordinal_words("fr", value).replace("vingtsième", "vingtième")


FRENCH = Language(
    num2words="fr",
    minus="moins",
    decimal="virgule",
    point="point",
    until="à",
    per="par",
    months=names("""janvier février mars avril mai juin juillet août septembre octobre novembre
        décembre"""),
    months_short={"aout": 8, "fevrier": 2, "decembre": 12},
    digits=names("""zéro un deux trois quatre cinq six sept huit neuf"""),
    units=nouns(
        """km=kilomètre/kilomètres | m=mètre/mètres | cm=centimètre/centimètres
        | mm=millimètre/millimètres | μm=micromètre/micromètres | kg=kilogramme/kilogrammes
        | g=gramme/grammes | mg=milligramme/milligrammes | t=tonne/tonnes/f | l=litre/litres
        | L=litre/litres | ml=millilitre/millilitres | mL=millilitre/millilitres
        | cl=centilitre/centilitres | h=heure/heures/f | min=minute/minutes/f
        | s=seconde/secondes/f | ms=milliseconde/millisecondes/f
        | km/h=kilomètre heure/kilomètres heure
        | m/s=mètre par seconde/mètres par seconde | m²=mètre carré/mètres carrés
        | km²=kilomètre carré/kilomètres carrés | cm²=centimètre carré/centimètres carrés
        | m³=mètre cube/mètres cubes | cm³=centimètre cube/centimètres cubes
        | ha=hectare/hectares | °=degré/degrés | °C=degré Celsius/degrés Celsius
        | °F=degré Fahrenheit/degrés Fahrenheit | %=pour cent/pour cent/ | W=watt/watts
        | kW=kilowatt/kilowatts | MW=mégawatt/mégawatts | kWh=kilowattheure/kilowattheures
        | V=volt/volts | Hz=hertz/hertz | kHz=kilohertz/kilohertz | MHz=mégahertz/mégahertz
        | GHz=gigahertz/gigahertz | dB=décibel/décibels | ko=kilooctet/kilooctets
        | Mo=mégaoctet/mégaoctets | Go=gigaoctet/gigaoctets | To=téraoctet/téraoctets
        | kcal=kilocalorie/kilocalories/f"""
    ),
    currencies=currencies(
        """EUR=euro/euros + centime/centimes | USD=dollar/dollars + cent/cents
        | GBP=livre/livres/f + penny/pence | JPY=yen/yens
        | CHF=franc suisse/francs suisses + centime/centimes | BRL=réal/réaux + centavo/centavos"""
    ),
    money="{major} {cents}",
    of_millions=" d'",
    fractions=pairs(
        """1/2=un demi | 1/3=un tiers | 2/3=deux tiers | 1/4=un quart | 3/4=trois quarts"""
    ),
    over="sur",
    scales=nouns(
        """million=million/millions | millions=million/millions | M=million/millions
        | milliard=milliard/milliards | milliards=milliard/milliards | Md=milliard/milliards
        | Mds=milliard/milliards | k=mille/mille/"""
    ),
    date="{day} {month}",
    dated="{date} {year}",
    day_month=r"\s+",
    hours=Noun("heure", "heures", FEMININE),
    clock="{hour} {hours} {minute}",
    full_hour="{hour} {hours}",
    first_day="premier",
    ordinal_ending=r"(?:(ers?|res?|ères?|ndes?|nds?|e|es|ème|èmes)\b)",
    ordinal=_ordinal,
    abbreviations=pairs(
        """M.=monsieur | MM.=messieurs | Mme=madame | Mmes=mesdames | Mlle=mademoiselle
        | Dr=docteur | Pr=professeur | St=saint | Ste=sainte | p. ex.=par exemple
        | c.-à-d.=c'est-à-dire | av. J.-C.=avant Jésus-Christ | apr. J.-C.=après Jésus-Christ
        | env.=environ | n°=numéro | N°=numéro | nº=numéro | tél.=téléphone | Tél.=téléphone
        | bd=boulevard | av.=avenue | etc.=et cetera"""
    ),
    labels=pairs(
        """p.=page | pp.=pages | art.=article | chap.=chapitre | fig.=figure | vol.=volume"""
    ),
    signs=pairs("""²=au carré | ³=au cube | &=et | @=arobase | +=plus | ×=fois | ÷=divisé par
        | ±=plus ou moins | §=paragraphe""")
    | {"=": "égale"},
    is_one_below_two=True,
    agree=_agree,
    gender_of=_gender_of,
    not_counted=frozenset(
        names("""a à au aux avec ce ces comme dans de des du elle en est et était il ils la le
        les leur mais ne ni nous ou où par pas plus pour qu que qui sa sans se ses si
        son sont sur un une vous y""")
    ),
    century=r"(?<![A-Za-zÀ-ÿ])(?P<roman>[IVX]+)(?:e|ème|(?<=I)er)(?![A-Za-zÀ-ÿ])",
    century_is_ordinal=True,
)
