/* What a replay asks of each of many tensors, asked of their memory.
 *
 * Of a tensor that nobody has touched, the bytes that torch keeps about it are what they were. So where Python has found once
 * that tensors are what a recording relies on, it is enough to compare these bytes: `Standing` does that, and asks Python again
 * where one byte is another. What the bytes mean it does not know; no answer comes from them but "as before".
 *
 * Nothing of torch is included here. Where the bytes lie, `native.py` finds out when it is imported, by changing tensors and
 * looking; where it cannot tell, none of this is used.
 *
 *     the object of Python's  ->  the implementation  ->  the storage
 *                                                     ->  what autograd knows of it, if anything
 *                                                     ->  the counter of its versions, shared by its views
 */
#include <Python.h>
#include <structmember.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#ifdef Py_GIL_DISABLED
#error "others could change a tensor while it is looked at"
#endif

/* Some bytes of an object: where they begin in it, and how many. */
typedef struct { Py_ssize_t from, many; } Span;

static struct {
    Py_ssize_t impl;                    /* in the object of Python's: where the reference to the implementation lies */
    Py_ssize_t storage, meta, version;  /* in the implementation: the references to the others */
    Py_ssize_t count;                   /* in the counter: the number */
    Span of_impl, of_storage;           /* what is compared */
    Span of_meta[2];                    /* (between these two lies the gradient, which is somebody else's question) */
} lies;

static PyObject *kinds;       /* torch's own classes of tensors, whose objects are laid out so */
static PyObject *any_tensor;  /* the class of all tensors */
static PyObject *torchs_bump; /* what moves versions in torch */

static inline char *reference(const void *in, Py_ssize_t at) { return *(char *const *)((const char *)in + at); }

static int is_plain(PyObject *t) {
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(kinds); i++)
        if ((PyObject *)Py_TYPE(t) == PyTuple_GET_ITEM(kinds, i)) return 1;
    return 0;
}

/* What is noted of one tensor: this, and after it the bytes of its parts, one span after the other. */
typedef struct { PyObject *tensor; PyTypeObject *kind; char *impl; } Head;

static Py_ssize_t noted_bytes(void) {
    return sizeof(Head) + lies.of_impl.many + lies.of_storage.many + lies.of_meta[0].many + lies.of_meta[1].many;
}

static char *note_span(char *into, const char *object, Span span) {
    memcpy(into, object + span.from, span.many);
    return into + span.many;
}

static void note(PyObject *t, char *into) {
    Head head = {t, Py_TYPE(t), reference(t, lies.impl)};
    memcpy(into, &head, sizeof head);
    into = note_span(into + sizeof head, head.impl, lies.of_impl);
    into = note_span(into, reference(head.impl, lies.storage), lies.of_storage);
    char *meta = reference(head.impl, lies.meta);
    for (int i = 0; meta && i < 2; i++) into = note_span(into, meta, lies.of_meta[i]);
}

static int same_span(const char **was, const char *object, Span span) {
    const char *before = *was;
    *was += span.many;
    return !memcmp(before, object + span.from, span.many);
}

/* Whether all of it is as noted. Each reference is followed only when it is known to be what it was: then what it leads to is
 * there, because it is held by what has just been looked at. */
static int stands(PyObject *t, const char *was) {
    Head head;
    memcpy(&head, was, sizeof head);
    if (t != head.tensor || Py_TYPE(t) != head.kind || reference(t, lies.impl) != head.impl) return 0;
    was += sizeof head;
    if (!same_span(&was, head.impl, lies.of_impl)) return 0;
    if (!same_span(&was, reference(head.impl, lies.storage), lies.of_storage)) return 0;
    char *meta = reference(head.impl, lies.meta);
    for (int i = 0; meta && i < 2; i++)
        if (!same_span(&was, meta, lies.of_meta[i])) return 0;
    return 1;
}

/* Standing(ask, of_one): `ask`, a function of a list of tensors that says whether they are as they have to be, and is asked only
 * where one of them is not what it was when it said yes. It may depend on nothing but the tensors, not on what they hold, and on
 * the state of the thread: that shows in any of them, so the first one is given to `of_one` each time. */
typedef struct {
    PyObject_HEAD
    vectorcallfunc call;
    PyObject *ask, *of_one;
    Py_ssize_t many;              /* tensors that are noted; -1: none are */
    char *noted;
    unsigned long long asked;     /* how often Python was */
} Standing;

static int all_stand(Standing *self, PyObject *tensors) {
    if (PyList_GET_SIZE(tensors) != self->many) return 0;
    Py_ssize_t size = noted_bytes();
    for (Py_ssize_t i = 0; i < self->many; i++)
        if (!stands(PyList_GET_ITEM(tensors, i), self->noted + i * size)) return 0;
    return 1;
}

/* Note them as they are now, in memory of its own: NULL (without an exception) if they cannot be noted. */
static char *note_all(PyObject *tensors) {
    Py_ssize_t many = PyList_GET_SIZE(tensors), size = noted_bytes();
    for (Py_ssize_t i = 0; i < many; i++)
        if (!is_plain(PyList_GET_ITEM(tensors, i))) return NULL;
    char *noted = PyMem_Calloc(many ? many : 1, size);
    for (Py_ssize_t i = 0; noted && i < many; i++) note(PyList_GET_ITEM(tensors, i), noted + i * size);
    return noted;
}

/* What is noted is what was there before Python was asked: whatever changes meanwhile is another then. */
static PyObject *ask_python(Standing *self, PyObject *tensors) {
    Py_ssize_t many = PyList_GET_SIZE(tensors);
    char *noted = note_all(tensors);
    self->many = -1;
    self->asked++;
    PyObject *answer = PyObject_CallOneArg(self->ask, tensors);
    int yes = answer ? PyObject_IsTrue(answer) : -1;
    if (yes == 1 && noted) {
        PyMem_Free(self->noted);
        self->noted = noted;
        self->many = many;
    } else {
        PyMem_Free(noted);
    }
    if (yes < 0) Py_CLEAR(answer);
    return answer;
}

static PyObject *standing_call(PyObject *of, PyObject *const *args, size_t nargs, PyObject *names) {
    Standing *self = (Standing *)of;
    if (PyVectorcall_NARGS(nargs) != 1 || (names && PyTuple_GET_SIZE(names))) {
        PyErr_SetString(PyExc_TypeError, "Standing takes one list of tensors");
        return NULL;
    }
    if (!PyList_CheckExact(args[0])) return PyObject_CallOneArg(self->ask, args[0]);
    if (!all_stand(self, args[0])) return ask_python(self, args[0]);
    if (!self->many) Py_RETURN_TRUE;
    PyObject *first = Py_NewRef(PyList_GET_ITEM(args[0], 0)), *answer = PyObject_CallOneArg(self->of_one, first);
    Py_DECREF(first);
    return answer;
}

static PyObject *standing_new(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
    PyObject *ask, *of_one;
    if (!PyArg_ParseTuple(args, "OO:Standing", &ask, &of_one)) return NULL;
    Standing *self = (Standing *)type->tp_alloc(type, 0);
    if (!self) return NULL;
    self->call = standing_call;
    self->ask = Py_NewRef(ask);
    self->of_one = Py_NewRef(of_one);
    self->many = -1;
    return (PyObject *)self;
}

static int standing_traverse(PyObject *self, visitproc visit, void *arg) {
    Py_VISIT(((Standing *)self)->ask);
    Py_VISIT(((Standing *)self)->of_one);
    return 0;
}

static int standing_clear(PyObject *self) {
    Py_CLEAR(((Standing *)self)->ask);
    Py_CLEAR(((Standing *)self)->of_one);
    return 0;
}

static void standing_dealloc(PyObject *self) {
    PyObject_GC_UnTrack(self);
    standing_clear(self);
    PyMem_Free(((Standing *)self)->noted);
    Py_TYPE(self)->tp_free(self);
}

static PyMemberDef standing_members[] = {
    {"ask", T_OBJECT_EX, offsetof(Standing, ask), READONLY, "Python's own question."},
    {"asked", T_ULONGLONG, offsetof(Standing, asked), READONLY, "How often that was asked."},
    {NULL, 0, 0, 0, NULL},
};

static PyTypeObject StandingType = {
    PyVarObject_HEAD_INIT(NULL, 0)
    .tp_name = "phonograph._torch._native.Standing",
    .tp_doc = "A question about tensors that is asked again only where one of them is not what it was.",
    .tp_basicsize = sizeof(Standing),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_HAVE_VECTORCALL,
    .tp_new = standing_new,
    .tp_call = PyVectorcall_Call,
    .tp_vectorcall_offset = offsetof(Standing, call),
    .tp_traverse = standing_traverse,
    .tp_clear = standing_clear,
    .tp_dealloc = standing_dealloc,
    .tp_members = standing_members,
};

/* Move the version of a tensor on by one, as torch does: 1. Where it has none, or is no tensor, torch says what that means: 0. */
static int bumped(PyObject *t) {
    if (!is_plain(t) && !PyObject_TypeCheck(t, (PyTypeObject *)any_tensor)) return 0;
    char *counter = reference(reference(t, lies.impl), lies.version);
    if (!counter) return 0;
    __atomic_fetch_add((uint32_t *)(counter + lies.count), 1, __ATOMIC_SEQ_CST);
    return 1;
}

static PyObject *bump(PyObject *module, PyObject *tensors) {
    PyObject *all = PySequence_Fast(tensors, "bump takes a list of tensors");
    if (!all) return NULL;
    for (Py_ssize_t i = 0; i < PySequence_Fast_GET_SIZE(all); i++) {
        PyObject *t = PySequence_Fast_GET_ITEM(all, i);
        if (bumped(t)) continue;
        PyObject *alone = PyTuple_Pack(1, t), *done = alone ? PyObject_CallOneArg(torchs_bump, alone) : NULL;
        Py_XDECREF(alone);
        if (!done) {
            Py_DECREF(all);
            return NULL;
        }
        Py_DECREF(done);
    }
    Py_DECREF(all);
    Py_RETURN_NONE;
}

static PyObject *set_up(PyObject *module, PyObject *args) {
    PyObject *own, *tensor, *torchs;
    if (!PyArg_ParseTuple(args, "O!OOnnnnn(nn)(nn)(nn)(nn):set_up", &PyTuple_Type, &own, &tensor, &torchs,
                          &lies.impl, &lies.storage, &lies.meta, &lies.version, &lies.count,
                          &lies.of_impl.from, &lies.of_impl.many, &lies.of_storage.from, &lies.of_storage.many,
                          &lies.of_meta[0].from, &lies.of_meta[0].many, &lies.of_meta[1].from, &lies.of_meta[1].many))
        return NULL;
    if (!PyType_Check(tensor)) {
        PyErr_SetString(PyExc_TypeError, "set_up takes a class of tensors");
        return NULL;
    }
    Py_XSETREF(kinds, Py_NewRef(own));
    Py_XSETREF(any_tensor, Py_NewRef(tensor));
    Py_XSETREF(torchs_bump, Py_NewRef(torchs));
    Py_RETURN_NONE;
}

static PyMethodDef methods[] = {
    {"set_up", set_up, METH_VARARGS, "Say where everything lies. Before that, nothing else may be called."},
    {"bump", bump, METH_O, "Move the version counters of tensors on."},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef module = {
    PyModuleDef_HEAD_INIT, .m_name = "_native", .m_doc = "What a replay asks of many tensors.", .m_size = -1, .m_methods = methods,
};

PyMODINIT_FUNC PyInit__native(void) {
    if (PyType_Ready(&StandingType) < 0) return NULL;
    PyObject *made = PyModule_Create(&module);
    if (made && PyModule_AddObjectRef(made, "Standing", (PyObject *)&StandingType) < 0) Py_CLEAR(made);
    return made;
}
