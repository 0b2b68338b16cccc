"""Portuguese, of Brazil and of Portugal."""

from __future__ import annotations

import re
from dataclasses import replace

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
    r".*(?:as?|ãs?|[çs]ão|[çs]ões|dades?|gens|gem|udes?)"
    r"|ve(?:z|zes)|mulher(?:es)?|noites?|tardes?|mães?|partes?|classes?|flor(?:es)?|chaves?"
    r"|fases?|bases?|redes?|sedes?|séries?|fotos?|leis?|cores?|vozes?|luzes?|opções?"
)
_MASCULINE = re.compile(
    r"(?:di|map|planet|problem|sistem|program|tem|poem|esquem|lem|dilem|teorem|idiom|clim|dram"
    r"|diplom|panoram|diagram|telegram|sintom|arom|dogm|fantasm|cinem|quilogram|gram|atlet|turist"
    r"|artist)as?|coração|corações"
)


def _gender_of(noun: str) -> str:
    is_feminine = _FEMININE.fullmatch(noun) and not _MASCULINE.fullmatch(noun)
    return FEMININE if is_feminine else MASCULINE


def _agree(words: str, gender: str, noun: str) -> str:
    """Return a number in front of a noun: "uma", "duas", "duzentas"."""
    if gender != FEMININE:
        return words
    millions = re.match(r".*[lb][ih](?:hão|hões|ão|ões) ?", words)
    head = millions.group() if millions else ""
    tail = re.sub(r"\bdois\b", "duas", re.sub(r"\bum$", "uma", words[len(head) :]))
    return head + re.sub(r"(duz|trez|quatroc|quinh|seisc|setec|oitoc|novec)entos", r"\1entas", tail)


def _ordinal(value: int, ending: str, before: str, behind: str) -> str:
    words = ordinal_words("pt", value)
    return re.sub(r"o\b", "a", words) if ending in ("ª", "a") else words


BRAZILIAN = Language(
    num2words="pt_BR",
    minus="menos",
    decimal="vírgula",
    point="ponto",
    until="a",
    per="por",
    months=names("""janeiro fevereiro março abril maio junho julho agosto setembro outubro
        novembro dezembro"""),
    digits=names("""zero um dois três quatro cinco seis sete oito nove"""),
    units=nouns(
        """km=quilômetro/quilômetros | m=metro/metros | cm=centímetro/centímetros
        | mm=milímetro/milímetros | μm=micrômetro/micrômetros | kg=quilograma/quilogramas
        | g=grama/gramas | mg=miligrama/miligramas | t=tonelada/toneladas/f | l=litro/litros
        | L=litro/litros | ml=mililitro/mililitros | mL=mililitro/mililitros
        | cl=centilitro/centilitros | h=hora/horas/f | min=minuto/minutos | s=segundo/segundos
        | ms=milissegundo/milissegundos | km/h=quilômetro por hora/quilômetros por hora
        | m/s=metro por segundo/metros por segundo | m²=metro quadrado/metros quadrados
        | km²=quilômetro quadrado/quilômetros quadrados
        | cm²=centímetro quadrado/centímetros quadrados | m³=metro cúbico/metros cúbicos
        | cm³=centímetro cúbico/centímetros cúbicos | ha=hectare/hectares | °=grau/graus
        | °C=grau Celsius/graus Celsius | °F=grau Fahrenheit/graus Fahrenheit
        | %=por cento/por cento/ | W=watt/watts | kW=quilowatt/quilowatts | MW=megawatt/megawatts
        | kWh=quilowatt-hora/quilowatts-hora | V=volt/volts | A=ampere/amperes | Hz=hertz/hertz
        | kHz=quilohertz/quilohertz | MHz=mega-hertz/mega-hertz | GHz=giga-hertz/giga-hertz
        | dB=decibel/decibéis | kB=quilobyte/quilobytes | KB=quilobyte/quilobytes
        | MB=megabyte/megabytes | GB=gigabyte/gigabytes | TB=terabyte/terabytes
        | kcal=quilocaloria/quilocalorias/f"""
    ),
    currencies=currencies(
        """BRL=real/reais + centavo/centavos | EUR=euro/euros + cêntimo/cêntimos
        | USD=dólar/dólares + centavo/centavos | GBP=libra/libras/f + pêni/pence | JPY=iene/ienes
        | CHF=franco suíço/francos suíços + cêntimo/cêntimos"""
    ),
    money="{major} e {cents} {cent}",
    of_millions=" de ",
    fractions=pairs(
        """1/2=meio | 1/3=um terço | 2/3=dois terços | 1/4=um quarto | 3/4=três quartos"""
    ),
    over="sobre",
    scales=nouns(
        """milhão=milhão/milhões | milhões=milhão/milhões | mi=milhão/milhões
        | bilhão=bilhão/bilhões | bilhões=bilhão/bilhões | bi=bilhão/bilhões | mil=mil/mil/"""
    ),
    date="{day} de {month}",
    dated="{date} de {year}",
    day_month=r"(?:\s+de)?\s+",
    hours=Noun("hora", "horas", FEMININE),
    clock="{hour} e {minute}",
    full_hour="{hour} {hours}",
    clock_unit=r"h(?:s|rs|oras?)?(?:\b|(?=\d))",
    first_day="primeiro",
    ordinal_ending=r"\.?(?:([ºª])|°(?=\s[a-z]{4}))",
    ordinal=_ordinal,
    abbreviations=pairs(
        """Sr.=senhor | Sra.=senhora | Srta.=senhorita | Srs.=senhores | Dr.=doutor
        | Dra.=doutora | Prof.=professor | Profa.=professora | p. ex.=por exemplo | nº=número
        | n.º=número | Nº=número | tel.=telefone | Tel.=telefone | av.=avenida | Av.=avenida
        | a. C.=antes de Cristo | d. C.=depois de Cristo | aprox.=aproximadamente
        | etc.=et cetera"""
    ),
    labels=pairs(
        """pág.=página | págs.=páginas | art.=artigo | cap.=capítulo | fig.=figura | vol.=volume"""
    ),
    signs=pairs("""²=ao quadrado | ³=ao cubo | &=e | @=arroba | +=mais | ×=vezes
        | ÷=dividido por | ±=mais ou menos | §=parágrafo""")
    | {"=": "igual a"},
    is_one_below_two=True,
    agree=_agree,
    gender_of=_gender_of,
    not_counted=frozenset(
        names("""a à ao aos as às até com como da das de dela dele desde do dos e é ela ele em
        entre era foi há mais mas mil na não nas nem no nos o os ou para pela pelo por
        que se sem ser seu sua são também tem um uma""")
    ),
    century=r"\b[Ss]éculos?\s(?P<roman>[IVXL]+)\b",
)
_EUROPEAN_SCALES = nouns(
    """milhão=milhão/milhões | milhões=milhão/milhões | M=milhão/milhões
    | mil milhões=mil milhões/mil milhões | mil=mil/mil/"""
)
_EUROPEAN_UNITS = {
    short: Noun(unit.one.replace("ô", "ó"), unit.many.replace("ô", "ó"), unit.gender)
    for short, unit in BRAZILIAN.units.items()
}
EUROPEAN = replace(BRAZILIAN, num2words="pt", scales=_EUROPEAN_SCALES, units=_EUROPEAN_UNITS)
